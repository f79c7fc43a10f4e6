"""Sends requests to another server and polls its health."""

import asyncio
import base64
import functools
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.backends.base import EventSink
from engine.backends.openai.answer import AnswerReceiver, run_side_by_side
from engine.backends.openai.config import OpenAIConfig, ServerAddress
from engine.backends.openai.dialects import TokenApi
from engine.backends.openai.discovery import DiscoveredServer
from engine.backends.openai.failures import KeyRefusedError, error_of, unavailable
from engine.backends.openai.http_client import (
    NO_HEADERS,
    ConnectFailed,
    HttpClient,
    TransportError,
)
from engine.backends.openai.reader import Expected
from engine.backends.openai.requests import BodyBuilder
from engine.backends.openai.wire import WireVector, decode_embeddings
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    UsageEvent,
)
from engine.core.observability.tracing import backend_call

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
# If a probe fails and it is not certain that the server is down, the server stays ready until this
# many probes have failed in a row.
MAX_DOUBTS = 2


@dataclass(frozen=True)
class Problem:
    why: str
    is_certain: bool  # whether it is certain that no request can succeed


Probe = Callable[[], Awaitable[Problem | None]]


class Watch:
    """Polls whether the server is ready. `is_ready` and `detail` have the latest result."""

    def __init__(self, probe: Probe, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._num_failures = 0
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        self.detail = "not connected yet"

    def start(self) -> None:
        self._set(None)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_ready, self.detail = False, "disconnected"

    def succeeded(self) -> None:
        """The server answered."""
        self._num_failures = 0
        if not self.is_ready:
            self._set(None)

    def failed(self, problem: Problem) -> None:
        """A request failed, and the server was the cause. Probe again soon."""
        if problem.is_certain:
            self._set(problem.why)
        self._hurry.set()

    async def _run(self) -> None:
        delay = self._interval_s
        while True:
            if self.is_ready and not self._num_failures:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), delay)
            else:
                await asyncio.sleep(delay)
            self._hurry.clear()
            problem = await self._probe()
            if problem is None:
                self.succeeded()
                delay = self._interval_s
                continue
            self._num_failures += 1
            if problem.is_certain or self._num_failures >= MAX_DOUBTS:
                self._set(problem.why)
            delay = min(self._interval_s, FIRST_RETRY_S * 2 ** min(self._num_failures - 1, 10))

    def _set(self, problem: str | None) -> None:
        was_ready, self.is_ready = self.is_ready, problem is None
        self.detail = problem or "ready"
        if was_ready and problem is not None:
            log.warning("the server is not ready: %s", problem)
        elif not was_ready and problem is None:
            log.info("the server is ready")


def text_body(api: TokenApi, model: str, text: str, special: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, api.text: text}
    if api.special is not None:
        body[api.special] = special
    return body


def read_ids(body: bytes) -> tuple[int, ...]:
    return tuple(_read(body, "tokens", list[int]))


def read_text(body: bytes, field: str) -> str:
    return str(_read(body, field, str))


def read_vectors(body: bytes, num_inputs: int) -> Embeddings:
    """One unit-length vector for each input, in input order."""
    import numpy as np  # imported late: nothing else here needs it

    try:
        answer = decode_embeddings(body)
        order = sorted(
            answer.data, key=lambda each: 0 if each.index is None else each.index
        )  # a server without indexes keeps the order
        rows = np.stack([_row(each) for each in order]) if order else np.zeros((0, 0), np.float32)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise unavailable("it sent vectors that can't be understood") from None
    if len(rows) != num_inputs or not np.isfinite(rows).all():
        raise unavailable("it sent other vectors than it was asked for")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    usage = answer.usage
    return Embeddings(unit, 0 if usage is None else usage.prompt_tokens or 0)


def _row(vector: WireVector) -> "NDArray[np.float32]":
    import numpy as np

    if isinstance(vector.embedding, str):
        raw = base64.b64decode(vector.embedding, validate=True)
        return np.frombuffer(raw, "<f4").astype(np.float32)
    return np.asarray(vector.embedding, np.float32)


def _read(body: bytes, field: str, kind: Any) -> Any:
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(found[field], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise unavailable("it sent tokens that can't be understood") from None


T = TypeVar("T")
Asked = ChatRequest | CompletionRequest
PROBE_TIMEOUT_S = 10.0
_NO_TOKENS = "This model's server shares no tokenizer."


class ServerLink:
    """One model of one server, with the server's health."""

    def __init__(
        self,
        client: HttpClient,
        config: OpenAIConfig,
        endpoint: ServerAddress,
        found: DiscoveredServer,
    ) -> None:
        self._client = client
        self._dialect = found.dialect
        self._prefix, self._root = endpoint.prefix, endpoint.root
        card = found.card
        self._bodies = BodyBuilder(
            found.dialect,
            card.id,
            max_model_len=card.max_model_len,
            vocab_size=found.vocab_size,
            extra=config.backend_args,
        )
        self._is_key_refused = False
        self.card = card
        interval_s = config.probe_interval_s or found.dialect.probe_interval_s
        self.watch = Watch(self._probe, interval_s)

    async def close(self) -> None:
        await self.watch.stop()
        self._client.close()

    async def answer(self, request: Asked, sink: EventSink) -> UsageEvent:
        """Push all events of the answer except the usage, and return the usage. Raises
        `EngineError` on failure.
        """
        if request.context.on_prompt is not None:
            request.context.on_prompt(None)
        if request.context.params.n > 1 and "n" in self._dialect.emulated:
            runs = [functools.partial(self._answer_one, each) for each in _one_by_one(request)]
            return await run_side_by_side(runs, sink)
        return await self._answer_one(request, sink)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        body = self._bodies.embedding(request)
        path = f"{self._prefix}/embeddings"
        with backend_call("embeddings", self.card.id, self._dialect.name) as headers:
            made = await self._within(request.timeout_s, self._post(path, body, headers))
        return read_vectors(made, len(request.inputs))

    async def tokenize(
        self, content: ChatRequest | str, special: bool, parse_special: bool = False
    ) -> tuple[int, ...]:
        api, model = self._dialect.tokens, self.card.id
        if api is None or (not isinstance(content, str) and api.chats is None):
            raise InvalidRequestError(_NO_TOKENS, param="model")
        if isinstance(content, str):
            body = text_body(api, model, content, special)
            if parse_special and api.chats == "template":
                body["parse_special"] = True  # the other servers always parse control tokens
        else:
            body = self._bodies.tokenized_chat(content)
            if api.chats == "template":
                rendered = await self._post(f"{self._root}/apply-template", body)
                text = read_text(rendered, "prompt")
                # The server has rendered its chat template, so its control tokens must be parsed.
                body = text_body(api, model, text, True) | {"parse_special": True}
        return read_ids(await self._post(f"{self._root}/tokenize", body))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        api = self._dialect.tokens
        if api is None:
            raise InvalidRequestError(_NO_TOKENS, param="model")
        body = {"model": self.card.id, "tokens": token_ids}
        return read_text(await self._post(f"{self._root}/detokenize", body), api.decoded)

    async def _answer_one(self, request: Asked, sink: EventSink) -> UsageEvent:
        context = request.context
        if isinstance(request, ChatRequest):
            path, body = "/chat/completions", self._bodies.chat(request)
        else:
            path, body = "/completions", self._bodies.completion(request)
            if context.params.max_tokens is None:
                body["max_tokens"] = await self._room(request)
        expected = await self._expected(request)
        operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
        with backend_call(operation, self.card.id, self._dialect.name) as headers:
            exchange = self._client.exchange(
                lambda: AnswerReceiver(expected, sink),
                "POST",
                f"{self._prefix}{path}",
                body,
                {"X-Request-Id": context.request_id, **headers},
            )
            return await self._within(context.timeout_s, self._observed(exchange))

    async def _expected(self, request: Asked) -> Expected:
        context, max_stops = request.context, self._dialect.max_stops
        echo, num_prompt = None, None
        if isinstance(request, CompletionRequest):
            prompt = request.prompt
            num_prompt = None if isinstance(prompt, str) else len(prompt)
            if isinstance(prompt, str):
                echo = prompt if request.echo else None
            elif request.echo and not context.params.score_prompt:
                echo = await self.detokenize(prompt)
        return Expected(
            params=context.params,
            own_stops=() if max_stops is None else context.params.stop[max_stops:],
            echo=echo,
            scores_prompt=context.params.score_prompt,
            num_prompt=num_prompt,
            grammar_param=None if context.grammar is None else context.grammar.param,
        )

    async def _room(self, request: CompletionRequest) -> int:
        """Number of tokens that fit in the context after the prompt. It is sent as `max_tokens`,
        because the servers' default is short.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._dialect.tokens is None:
                raise InvalidRequestError(
                    "max_tokens is needed here: the model's server does not report how many tokens "
                    "a prompt has.",
                    param="max_tokens",
                )
            prompt = await self.tokenize(prompt, True)
        return max(1, self.card.max_model_len - len(prompt))

    async def _post(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] = NO_HEADERS
    ) -> bytes:
        return await self._observed(self._whole(path, body, headers))

    async def _whole(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        response = await self._client.request("POST", path, body, headers=headers)
        if response.status != 200:
            raise error_of(response.status, response.headers, response.body)
        return response.body

    async def _within(self, seconds: float | None, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request took longer than {seconds:g} seconds."
            ) from None

    async def _observed(self, work: Awaitable[T]) -> T:
        """Await `work` and report its result to the watch."""
        try:
            done = await work
        except TransportError as error:
            self.watch.failed(Problem(str(error), isinstance(error, ConnectFailed)))
            raise unavailable(str(error)) from None
        except UnavailableError as error:
            self._is_key_refused = isinstance(error, KeyRefusedError)
            self.watch.failed(Problem(error.message, self._is_key_refused))
            raise
        except EngineError:
            self.watch.succeeded()  # a refusal shows that the server works
            raise
        self.watch.succeeded()
        return done

    async def _probe(self) -> Problem | None:
        began_at = asyncio.get_running_loop().time()
        path = f"{self._prefix}/models"
        if self._dialect.health_path is not None and not self._is_key_refused:
            path = f"{self._root}{self._dialect.health_path}"
        try:
            response = await self._client.request("GET", path, timeout_s=PROBE_TIMEOUT_S)
        except TransportError as error:
            if self._client.has_heard_since(began_at):
                return None  # the server is busy, but answers other requests
            return Problem(str(error), isinstance(error, ConnectFailed))
        self._is_key_refused = response.status in (401, 403)
        if self._is_key_refused:
            return Problem("it does not accept this server's key", True)
        if response.status >= 500:
            return Problem(f"it answers with status {response.status}", True)
        return None


def _one_by_one(request: Asked) -> list[Asked]:
    """Split a request into one per choice, each with its own seed."""
    made: list[Asked] = []
    context = request.context
    for index in range(context.params.n):
        seed = context.params.seed
        params = msgspec.structs.replace(
            context.params, n=1, seed=None if seed is None else (seed + index) % 2**63
        )
        own = msgspec.structs.replace(
            context, params=params, request_id=f"{context.request_id}-{index}"
        )
        made.append(msgspec.structs.replace(request, context=own))
    return made
