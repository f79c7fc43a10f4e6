"""The server in front of vLLM: it passes requests on, and adds the engine's `interp`.

`/v1/interp/sites`, `/v1/interp/run`, and `interp` on chats and completions are as in
docs/interpretability.md, as far as hooks in vLLM's workers can do it (worker_taps.py). vLLM can't
tell its worker which tokens belong to which request, so a request with `interp` runs alone: it
waits until the others have ended, and others wait for it.
"""

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import prod
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
)
from engine.core.interfaces.interp import Edit, InterpRequest, Span
from engine.core.interp.resolving import resolved
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import InterpSpec, parse_interp
from engine.core.interp.vectors import VectorStore

MAX_BYTES = 64 * 2**20
MAX_TOKENS = 16  # of requests with `interp` that do not say it
# What the workers' hooks do not do; the engine's own backends do.
NOT_HERE = ("lens", "attention", "features", "attribution", "store")
PASSED_ON = ("/v1/{rest:path}", "/tokenize", "/detokenize", "/health", "/version")
HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding"}


class Gate:
    """Many requests at a time, or one alone."""

    def __init__(self) -> None:
        self._entrance = asyncio.Lock()
        self._num_shared = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def enter(self) -> None:
        async with self._entrance:
            self._num_shared += 1
            self._is_idle.clear()

    def leave(self) -> None:
        self._num_shared -= 1
        if not self._num_shared:
            self._is_idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._entrance:
            await self._is_idle.wait()
            yield


class Front:
    def __init__(self, vllm: httpx.AsyncClient, vectors: Path) -> None:
        self._vllm, self._store, self._gate = vllm, VectorStore(vectors), Gate()

    @property
    def app(self) -> Starlette:
        routes = [
            Route("/v1/interp/sites", self._sites),
            Route("/v1/interp/run", self._run, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/chat/completions", self._completion, methods=["POST"]),
            *(Route(path, self._pass_on, methods=["GET", "POST"]) for path in PASSED_ON),
        ]
        return Starlette(routes=routes, exception_handlers={EngineError: _refused})

    async def _sites(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._known_sites()})

    async def _run(self, request: Request) -> Response:
        body = await _json(request)
        told = body | {"max_tokens": 1, "temperature": 0}
        answer, made = await self._probed("/v1/completions", told)
        first = answer["choices"][0]["text"]
        return JSONResponse(
            {
                "id": answer["id"],
                "object": "interp.run",
                "model": answer["model"],
                "next_token": {"text": first},
                "usage": {"prompt_tokens": answer["usage"]["prompt_tokens"]},
                "interp": made,
            }
        )

    async def _completion(self, request: Request) -> Response:
        body = await _json(request)
        if "interp" not in body:
            return await self._pass_on(request)
        if body.get("stream"):
            raise InvalidRequestError(
                "interp: send stream false, in front of vLLM.", param="stream"
            )
        if not {"max_tokens", "max_completion_tokens"} & body.keys():
            body["max_tokens"] = MAX_TOKENS
        answer, made = await self._probed(request.url.path, body)
        return JSONResponse(answer | {"interp": made})

    async def _pass_on(self, request: Request) -> Response:
        sent = self._vllm.build_request(
            request.method,
            request.url.path,
            params=request.query_params,
            headers=[each for each in request.headers.items() if each[0] not in HOP_BY_HOP],
            content=await request.body(),
        )
        await self._gate.enter()
        try:
            answer = await self._vllm.send(sent, stream=True)
        except BaseException:
            self._gate.leave()
            raise
        headers = {k: v for k, v in answer.headers.items() if k not in HOP_BY_HOP}
        return StreamingResponse(self._pieces(answer), answer.status_code, headers)

    async def _pieces(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:  # at the end, or when the client has gone
            try:
                await answer.aclose()
            finally:
                self._gate.leave()

    async def _probed(self, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
        """vLLM's answer, and what the hooks read."""
        spec = parse_interp(body.pop("interp", None))
        _refuse_what_is_missing(spec)
        made = await asyncio.to_thread(resolved, spec, self._store, _no_result, MAX_BYTES)
        widths = {each["name"]: prod(each["shape"]) for each in await self._known_sites()}
        tokens = await self._tokens(body)
        num_new = body.get("max_tokens") or body.get("max_completion_tokens") or MAX_TOKENS
        num_tokens = len(tokens["tokens"]) + num_new - 1
        _check(made, widths, len(tokens["tokens"]), num_tokens)
        asked = _message(made, len(tokens["tokens"]))
        async with self._gate.alone():
            await self._rpc("interp_begin", json.dumps(asked))
            try:
                answer = await self._post(path, body)
            finally:
                found = await self._rpc("interp_end")
        if found["is_mixed"]:
            raise InferenceError("Another request ran beside this one in vLLM; send it again.")
        if not made.captures:
            return answer, None
        captures = [_values(each, spec.encoding_format) for each in found["captures"]]
        told = {"id": None, "inline": True, "num_prompt": len(tokens["tokens"])}
        shown = {"token_ids": tokens["tokens"], "tokens": tokens["token_strs"]}
        return answer, told | shown | {"captures": captures}

    async def _known_sites(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._rpc("interp_sites")
        return found

    async def _tokens(self, body: dict[str, Any]) -> Any:
        """The prompt's tokens, as vLLM will compute them."""
        names = ("model", "prompt", "messages", "add_special_tokens", "tools")
        told = {name: body[name] for name in names if name in body}
        if isinstance(told.get("prompt"), list):
            if not all(isinstance(each, int) for each in told["prompt"]):
                raise InvalidRequestError("interp: send one prompt.", param="prompt")
            return {"tokens": told["prompt"], "token_strs": None}
        return await self._post("/tokenize", told | {"return_token_strs": True})

    async def _rpc(self, method: str, *given: str) -> Any:
        """The first worker's answer. All workers of a tensor-parallel model read the same."""
        told = await self._post("/collective_rpc", {"method": method, "args": given})
        return told["results"][0]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._vllm.post(path, json=body)
        if answer.status_code != 200:
            raise _VllmError(answer)
        return answer.json()


class _VllmError(EngineError):
    """What vLLM answered instead."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text[:2000])
        self.answer = answer


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    if isinstance(error, _VllmError):
        media = error.answer.headers.get("content-type")
        return Response(error.answer.content, error.answer.status_code, media_type=media)
    return JSONResponse(error.body(), error.status)


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return body


def _refuse_what_is_missing(spec: InterpSpec) -> None:
    for name in NOT_HERE:
        if getattr(spec, name):
            raise InvalidRequestError(
                f"interp.{name}: hooks in vLLM's workers capture and edit alone; the engine's own "
                "backends have it.",
                param=f"interp.{name}",
            )


def _no_result(_: str) -> InterpResult:
    raise NotFoundError("Results are not stored in front of vLLM; send the vector.", param="interp")


def _check(made: InterpRequest, widths: dict[str, int], num_prompt: int, num_tokens: int) -> None:
    total = 0
    for each in (*made.captures, *made.edits):
        if each.site not in widths:
            raise InvalidRequestError(
                f"interp: there is no site {each.site}; GET /v1/interp/sites lists them.",
                param="interp",
            )
        if isinstance(each, Edit):
            _check_edit(each, widths[each.site])
        else:
            total += 4 * widths[each.site] * each.span.count(num_prompt, num_tokens)
    if total > MAX_BYTES:
        raise PayloadTooLargeError(
            f"interp: the request could capture {total:,} bytes, and may capture {MAX_BYTES:,}.",
            param="interp",
        )


def _check_edit(edit: Edit, width: int) -> None:
    if edit.kind == "clamp" or len(edit.vectors) > 1:
        raise InvalidRequestError("interp: clamp is not possible in vLLM.", param="interp")
    if any(len(each) != 4 * width for each in edit.vectors):
        raise InvalidRequestError(
            f"interp: {edit.site} has {width} values, and the vector has another number.",
            param="interp",
        )


def _message(made: InterpRequest, num_prompt: int) -> dict[str, Any]:
    def where(site: str, span: Span) -> dict[str, Any]:
        places = span.resolved(num_prompt)
        chosen = None if places is None else sorted(places)
        return {"site": site, "positions": chosen, "phase": span.phase}

    captures = [where(each.site, each.span) for each in made.captures]
    edits = [
        where(each.site, each.span)
        | {"kind": each.kind, "scale": each.scale}
        | {"vectors": [base64.b64encode(vector).decode() for vector in each.vectors]}
        for each in made.edits
    ]
    return {"num_prompt": num_prompt, "captures": captures, "edits": edits}


def _values(captured: dict[str, Any], encoding: str) -> dict[str, Any]:
    if encoding == "base64":
        return captured
    flat = array("f", base64.b64decode(captured["values"])).tolist()
    width = captured["shape"][1]
    rows = [flat[start : start + width] for start in range(0, len(flat), width or 1)]
    return captured | {"values": rows}
