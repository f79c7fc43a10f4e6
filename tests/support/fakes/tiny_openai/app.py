"""Routes of the tiny server. Every answer passes its `Fault`, which may change it."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from tests.support.fakes.tiny_openai.checks import MODEL, check_model, parse
from tests.support.fakes.tiny_openai.model import ANSWER, CONTEXT_LENGTH, Mistake, token_id
from tests.support.fakes.tiny_openai.openai_api import (
    Chat,
    Completion,
    batch_line,
    embeddings,
    new_id,
    rerank,
)
from tests.support.fakes.tiny_openai.other_apis import Message, Response, Stored, count

WRONG_KEY = "Bearer not-the-key-of-this-server"
STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


TOKENIZER = {"bos_token": None, "eos_token": "<e> ", "chat_template": "{{ messages }}"}


@dataclass
class Outgoing:
    """An answer on its way out, which a fault may change."""

    path: str
    request: dict[str, Any]
    status: int
    headers: dict[str, str]
    body: Any = None  # JSON, or bytes
    events: list[Any] | None = None  # of a stream: JSON, or text that is sent as data, or bytes

    def response(self) -> HttpResponse:
        if self.events is not None:
            content = b"".join(_event(self.path, event) for event in self.events)
        elif isinstance(self.body, bytes):
            content = self.body
        else:
            content = json.dumps(self.body).encode()
        return HttpResponse(content, self.status, self.headers)


Fault = Callable[[Outgoing], None]


def _event(path: str, event: Any) -> bytes:
    if isinstance(event, bytes):
        return event
    data = event if isinstance(event, str) else json.dumps(event)
    is_named = path in ("/v1/messages", "/v1/responses") and isinstance(event, dict)
    name = f"event: {event['type']}\n" if is_named else ""
    return f"{name}data: {data}\n\n".encode()


class TinyServer:
    def __init__(self, fault: Fault = lambda outgoing: None) -> None:
        self._fault = fault
        self._seen: set[str] = set()
        self._stored: Stored = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._contents: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self.app = Starlette(routes=self._routes())
        self.app.add_exception_handler(HTTPException, self._http_error)

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._post(self._chat), methods=["POST", "OPTIONS"]),
            Route("/v1/completions", self._post(self._completion), methods=["POST"]),
            Route("/v1/embeddings", self._post(embeddings), methods=["POST"]),
            Route("/v1/rerank", self._post(rerank), methods=["POST"]),
            Route("/v1/responses", self._post(self._response), methods=["POST"]),
            Route("/v1/responses/{id}", self._one(self._responses), methods=["GET", "DELETE"]),
            Route("/v1/messages", self._post(self._message), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._post(self._count), methods=["POST"]),
            Route("/tokenize", self._post(self._tokenize), methods=["POST"]),
            Route("/tokenizer_info", self._get(lambda: TOKENIZER)),
            Route("/v1/fim/completions", self._post(self._fill_in), methods=["POST"]),
            Route("/health", self._get(lambda: {"status": "ok"})),
            Route("/v1/models", self._get(lambda: {"object": "list", "data": [self._model()]})),
            Route("/v1/models/{id:path}", self._one(self._models)),
            Route("/v1/files", self._upload, methods=["GET", "POST"]),
            Route("/v1/files/{id}", self._one(self._file), methods=["GET", "DELETE"]),
            Route("/v1/files/{id}/content", self._one(self._content)),
            Route("/v1/batches", self._post(self._batch), methods=["GET", "POST"]),
            Route("/v1/batches/{id}", self._one(self._found_batch)),
        ]

    def _send(self, outgoing: Outgoing) -> HttpResponse:
        outgoing.headers["x-request-id"] = new_id("req")
        self._fault(outgoing)
        return outgoing.response()

    def _json(self, path: str, request: Any, status: int, body: Any) -> HttpResponse:
        headers = {"content-type": "application/json"}
        if status >= 400:
            headers["x-should-retry"] = "false"
        if status == 429:
            headers["retry-after"] = "1"
        return self._send(Outgoing(path, request, status, headers, body))

    def _refusal(self, path: str, request: Any, mistake: Mistake) -> HttpResponse:
        error: dict[str, Any] = {"message": mistake.message, "type": "invalid_request_error"}
        body: dict[str, Any] = {"error": error | {"param": mistake.param, "code": None}}
        if path.startswith("/v1/messages"):
            if mistake.param == "thread":
                error["details"] = {"error_code": "thread_unsupported_request"}
            body = {"type": "error", "error": error}
        return self._json(path, request, mistake.status, body)

    def _post(self, handle: Callable[[dict[str, Any]], Any]) -> Any:
        async def answer(request: Request) -> HttpResponse:
            path = request.url.path
            if request.method == "OPTIONS":
                wanted = request.headers["access-control-request-headers"]
                headers = {"access-control-allow-origin": "*"}
                headers["access-control-allow-headers"] = wanted
                return self._send(Outgoing(path, {}, 200, headers, b""))
            body: dict[str, Any] = {}
            try:
                body = parse(await request.body()) if request.method == "POST" else {}
                made = handle(body)
            except Mistake as mistake:
                return self._refusal(path, body, mistake)
            if isinstance(made, list):
                return self._send(Outgoing(path, body, 200, dict(STREAM_HEADERS), None, made))
            return self._json(path, body, 200, made)

        return answer

    def _get(self, handle: Callable[[], Any]) -> Callable[[Request], Awaitable[HttpResponse]]:
        async def answer(request: Request) -> HttpResponse:
            path = request.url.path
            if request.headers.get("authorization") == WRONG_KEY:
                return self._refusal(path, {}, Mistake("the key is wrong", status=401))
            return self._json(path, {}, 200, handle())

        return answer

    def _one(self, handle: Callable[[str, bool], Any]) -> Any:
        async def answer(request: Request) -> HttpResponse:
            path, id = request.url.path, request.path_params["id"]
            try:
                made = handle(id, request.method == "DELETE")
            except KeyError:
                return self._refusal(path, {}, Mistake(f"there is no {id}", status=404))
            return self._json(path, {}, 200, made)

        return answer

    async def _http_error(self, request: Request, error: Exception) -> HttpResponse:
        assert isinstance(error, HTTPException)
        mistake = Mistake("there is nothing here", status=error.status_code)
        return self._refusal(request.url.path, {}, mistake)

    def _chat(self, body: dict[str, Any]) -> Any:
        chat = Chat(body, self._seen)
        return chat.chunks() if body.get("stream") else chat.whole()

    def _completion(self, body: dict[str, Any]) -> Any:
        completion = Completion(body)
        return completion.chunks() if body.get("stream") else completion.whole()

    def _response(self, body: dict[str, Any]) -> Any:
        response = Response(body, self._stored)
        return response.chunks() if body.get("stream") else response.body

    def _responses(self, id: str, is_delete: bool) -> Any:
        if is_delete:
            del self._stored[id]
            return {"id": id, "object": "response", "deleted": True}
        return self._stored[id][0]

    def _message(self, body: dict[str, Any]) -> Any:
        message = Message(body)
        return message.chunks() if body.get("stream") else message.body

    def _count(self, body: dict[str, Any]) -> Any:
        return {"input_tokens": count(body)[1]}

    def _tokenize(self, body: dict[str, Any]) -> Any:
        check_model(body)
        if "messages" in body:
            return {"tokens": [token_id(word) for word in ANSWER]}
        return {"tokens": [token_id(word) for word in ANSWER if word == body["prompt"]]}

    def _fill_in(self, body: dict[str, Any]) -> Any:
        return self._chat(body | {"messages": [{"role": "user", "content": body["prompt"]}]})

    def _model(self) -> dict[str, Any]:
        fields = {"object": "model", "created": 1_700_000_000, "owned_by": "tests"}
        return {"id": MODEL, **fields, "max_model_len": CONTEXT_LENGTH}

    def _models(self, id: str, is_delete: bool) -> Any:
        return {MODEL: self._model()}[id]

    async def _upload(self, request: Request) -> HttpResponse:
        if request.method == "GET":
            listed = {"object": "list", "data": list(self._files.values())}
            return self._json("/v1/files", {}, 200, listed)
        form = await request.form()
        file = form["file"]
        assert not isinstance(file, str)
        made = self._keep(await file.read(), file.filename or "")
        return self._json("/v1/files", {"purpose": form["purpose"]}, 200, made)

    def _keep(self, content: bytes, name: str) -> dict[str, Any]:
        made = {"id": new_id("file"), "object": "file", "bytes": len(content), "filename": name}
        self._files[made["id"]] = made | {"purpose": "batch"}
        self._contents[made["id"]] = content
        return self._files[made["id"]]

    def _file(self, id: str, is_delete: bool) -> Any:
        if is_delete:
            del self._files[id]
            return {"id": id, "deleted": True}
        return self._files[id]

    def _content(self, id: str, is_delete: bool) -> Any:
        return self._contents[id]

    def _batch(self, body: dict[str, Any]) -> Any:
        if not body:
            return {"object": "list", "data": list(self._batches.values())}
        if body["input_file_id"] not in self._contents:
            raise Mistake("there is no such file", "input_file_id")
        lines = self._contents[body["input_file_id"]].decode().splitlines()
        output = "\n".join(batch_line(line) for line in lines).encode()
        made = {"id": new_id("batch"), "object": "batch", "status": "completed"}
        made["output_file_id"] = self._keep(output, "output.jsonl")["id"]
        self._batches[made["id"]] = made
        return made

    def _found_batch(self, id: str, is_delete: bool) -> Any:
        return self._batches[id]
