"""Opens requests that have an `interp` object, and adds what they read to the answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request

from engine.core.errors import InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import ChatRequest, CompletionRequest, Event, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.core.interp.resolving import resolved
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import InterpSpec, parse_interp
from engine.core.interp.vectors import VectorStore
from engine.core.tensor_file import num_value_bytes
from engine.servers.access.auth import principal_of
from engine.servers.serving.services import Services

NO_TAPS = "is answered by a backend that shows no activations"


def vector_store(services: Services) -> VectorStore:
    return VectorStore(services.settings.vectors_dir)


class InterpOpener:
    """Opens requests at the backend, with the captures and edits of `spec` added to them."""

    def __init__(
        self,
        services: Services,
        request: Request,
        card: ModelCard,
        spec: InterpSpec,
        params: SamplingParams,
        num_prompts: int = 1,
    ) -> None:
        services.require(card, "interp", "interp", NO_TAPS)
        if spec.reads and (params.n > 1 or num_prompts > 1):
            raise InvalidRequestError(
                "interp: activations are read for one prompt and one choice; send n 1.",
                param="interp",
            )
        if spec.reads and (params.stop or params.stop_regex):
            raise InvalidRequestError(
                "interp: a request that reads activations ends by tokens; use stop_token_ids "
                "instead of stop.",
                param="stop",
            )
        self._services, self._spec, self._card = services, spec, card
        self._tenant = principal_of(request).name
        self._captured: bytes | None = None
        self._id = ""

    async def open(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[Event]:
        self._id = request.context.request_id
        store, results = vector_store(self._services), self._services.interp_results
        max_bytes = self._services.settings.interp.max_capture_mb * 2**20
        made = await asyncio.to_thread(
            resolved, self._spec, store, lambda name: results.find(name, self._tenant), max_bytes
        )
        target = self._spec.attribution and self._spec.attribution.target
        if isinstance(target, str):
            made = await self._with_target(made, target)
        context = msgspec.structs.replace(
            request.context, interp=made, on_captured=self._keep if made.reads else None
        )
        return await self._services.backend.open(msgspec.structs.replace(request, context=context))

    async def _with_target(self, made: Any, target: str) -> Any:
        ids = await self._services.backend.tokenize(
            target, model=self._card.id, add_special_tokens=False
        )
        if len(ids) != 1:
            raise InvalidRequestError(
                f"interp.attribution.target: {target!r} is {len(ids)} tokens; send one token.",
                param="interp.attribution.target",
            )
        attribution = msgspec.structs.replace(made.attribution, target=ids[0])
        return msgspec.structs.replace(made, attribution=attribution)

    def _keep(self, data: bytes) -> None:
        """Store what the request read, for later requests and for streams. Small results are a part
        of the answer, so they need no room.
        """
        self._captured = data
        results, name = self._services.interp_results, self._id.removesuffix("-0")
        try:
            results.put(name, self._tenant, data)
        except RateLimitError:
            if self._spec.store or not self._is_small(data):
                raise

    def _is_small(self, data: bytes) -> bool:
        return num_value_bytes(data) <= self._services.settings.interp.inline_kb * 1024

    async def answer(self) -> dict[str, Any] | None:
        """The `interp` part of the answer, when the request has ended. Large results are sent as
        an id only.
        """
        if self._captured is None:
            return None
        services, spec = self._services, self._spec
        settings, data = services.settings.interp, self._captured
        made: dict[str, Any] = {"id": self._id.removesuffix("-0")}
        is_small = self._is_small(data)
        encoding = spec.encoding_format if is_small else "none"
        result, shown = await asyncio.to_thread(_read, data, encoding)
        made |= {"inline": is_small, "bytes": len(data), "expires_s": settings.result_ttl_s} | shown
        await self._name_tokens(made)
        if spec.features is not None:
            # Imported here, because it needs numpy.
            from engine.core.interp.features import top_features

            store = vector_store(services)
            made["features"] = await asyncio.to_thread(top_features, spec.features, store, result)
        if is_small and not spec.store:
            services.interp_results.discard(made["id"], self._tenant)
            made["id"] = None
        return made

    async def _name_tokens(self, made: dict[str, Any]) -> None:
        """Add the texts of the tokens of the sequence and of the lens."""
        ids = made["token_ids"]
        lens: list[dict[str, Any]] = made.get("lens", []) if made["inline"] else []
        wanted = sorted({*ids, *(token for row in lens for token, _ in row["top"])})
        texts = await self._services.backend.token_bytes(tuple(wanted), model=self._card.id)
        names = {t: raw.decode("utf-8", "replace") for t, raw in zip(wanted, texts, strict=True)}
        made["tokens"] = [names[token] for token in ids]
        for row in lens:
            row["top"] = [
                {"token": names[token], "id": token, "logprob": logprob}
                for token, logprob in row["top"]
            ]


def _read(data: bytes, encoding: str) -> tuple[InterpResult, dict[str, Any]]:
    result = InterpResult(data)
    return result, result.body(encoding)


def interp_opener(
    services: Services,
    request: Request,
    card: ModelCard,
    raw: Any,
    params: SamplingParams,
    num_prompts: int = 1,
) -> InterpOpener:
    return InterpOpener(services, request, card, parse_interp(raw), params, num_prompts)
