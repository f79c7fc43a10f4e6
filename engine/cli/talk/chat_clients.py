"""What answers in a conversation: a model in this process, or a server."""

import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from engine.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from engine.core.interfaces.backend import Event, ReasoningEvent, TextEvent, UsageEvent

Messages = Sequence[Mapping[str, Any]]
PROBE_TIMEOUT_S = 0.5


class Talker(Protocol):
    """A model that answers conversations. `params` are sampling parameters by name."""

    name: str
    place: str  # where the model runs, for the user
    defaults: Mapping[str, Any]  # sampling parameters that are used unless others are given

    def stream(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Event]: ...

    def close(self) -> None: ...


class LocalTalker:
    """A model that runs in this process."""

    place = "in this process"

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        from engine.llm import LLM

        self._llm = LLM(model, settings=settings)
        self.name: str = self._llm.card.id
        self.defaults: Mapping[str, Any] = (
            self._llm.card.chat_sampling | self._llm.preset_parameters
        )

    def stream(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Event]:
        from engine.sampling_params import make_params

        return self._llm.stream_chat(messages, make_params(params))

    def close(self) -> None:
        self._llm.close()


class ServerTalker:
    """A model of any OpenAI-compatible server. Without a model name, the server's first one. Our
    own server says which sampling suits its models; others have defaults of their own.
    """

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        import httpx

        if not url.startswith(("http://", "https://")):
            raise InvalidRequestError(f"{url} is no address: begin it with http:// or https://.")
        self.place = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(600.0, connect=10.0)
        self._client = httpx.Client(
            base_url=f"{self.place}/v1", headers=headers, timeout=timeout, trust_env=False
        )
        reply = self._models()
        ids = model_ids(reply)
        if model is None and not ids:
            raise _refusal(reply.status_code, reply.content, self.place)
        self.name = model or ids[0]
        self.defaults: Mapping[str, Any] = {}
        if self.name in ids:
            self.defaults = reply.json()["data"][ids.index(self.name)].get("chat_sampling", {})

    def _models(self) -> Any:
        import httpx

        try:
            return self._client.get("/models")
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"Nothing answers at {self.place} ({error}). Start a server with `engine serve`."
            ) from None

    def stream(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Event]:
        import httpx

        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        first: float | None = None
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, reply.read(), self.place)
                for line in reply.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    for event in _events(json.loads(line.removeprefix("data: ")), first):
                        first = first or time.monotonic()
                        yield event
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.place} broke off ({error}).") from None

    def close(self) -> None:
        self._client.close()


def _events(chunk: dict[str, Any], first: float | None) -> Generator[Event]:
    if error := chunk.get("error"):
        raise UnavailableError(str(error.get("message", error)))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningEvent(0, text)
        if text := delta.get("content"):
            yield TextEvent(0, text, 1)
    if usage := chunk.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        yield UsageEvent(
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
            cached,
            decode_s=0.0 if first is None else time.monotonic() - first,
        )


def model_ids(reply: Any) -> list[str]:
    """The ids in the answer of `/v1/models`. Empty if it is another kind of answer."""
    try:
        found = reply.json()
        return [str(each["id"]) for each in found["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _refusal(status: int, content: bytes, place: str) -> Exception:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{place} answered with {status}."
    kinds = {401: AuthenticationError, 404: NotFoundError}
    if status in kinds:
        return kinds[status](message)
    return InvalidRequestError(message) if status < 500 else UnavailableError(message)


def find_server(model: str | None) -> ServerTalker | None:
    """A server of this machine, at the address of the settings, that serves the model. None if no
    server runs there, or if it serves other models only.
    """
    import httpx

    from engine.cli.console import own_server
    from engine.core.store.model_store import default_name

    url, key = own_server()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S, headers=headers) as client:
            ids = model_ids(client.get(f"{url}/v1/models"))
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if model is None:
        return ServerTalker(url, ids[0], key) if ids else None
    names = (model, model.removeprefix("hf:"), default_name(model))
    served = next((name for name in names if name in ids), None)
    return None if served is None else ServerTalker(url, served, key)


def open_talker(
    model: str | None,
    *,
    url: str | None,
    key: str | None,
    settings: Mapping[str, Any],
    uses_server: bool = False,
) -> Talker:
    """The server at `url`, or else, with `uses_server`, a server of this machine that serves the
    model, or else the model in this process.
    """
    if url is not None:
        return ServerTalker(url, model, key)
    # Settings for the model cannot be given to a server that runs already.
    if uses_server and not settings and (found := find_server(model)) is not None:
        return found
    from engine.cli.console import messages
    from engine.core.store.catalogue import DEFAULT_MODEL
    from engine.core.store.model_store import needs_pull

    model = model or os.environ.get("LLM_ENGINE_MODEL_PATH") or DEFAULT_MODEL
    if needs_pull(model):
        from engine.cli.pull_progress import pull_shown

        pull_shown(model)
    with messages().status("Loading the model ..."):
        return LocalTalker(model, settings)
