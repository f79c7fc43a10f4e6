"""The server under test. The methods of `Target` send requests and return replies. An error status
raises no exception.

Every request carries the headers that OpenAI's SDK sends. If several rules inspect the same answer,
it is requested only once.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from engine_tools.conformance.expect import REFUSALS, RuleFailed, RuleSkipped
from engine_tools.conformance.sse import SseStream, read_stream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = "What is the capital of France? Answer in one short sentence."
SDK_HEADERS = {
    "user-agent": "OpenAI/Python 2.54.0",
    "x-stainless-lang": "python",
    "x-stainless-package-version": "2.54.0",
    "x-stainless-os": "Linux",
    "x-stainless-arch": "x64",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.0",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}
_MISSING = frozenset({404, 405, 501})
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: httpx.Headers
    content: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            raise RuleFailed(f"{self.summary} is not JSON") from None

    def ok(self) -> Any:
        """The JSON of a successful reply. If the reply was not successful, the rule fails."""
        if self.status != 200:
            raise RuleFailed(self.summary)
        return self.json()

    def refused(self) -> "Reply":
        """Fail the rule unless the reply has a 4xx status that reports a client error."""
        if self.status in REFUSALS:
            return self
        if self.status >= 500:
            raise RuleFailed(f"a client's mistake is answered with {self.summary}")
        raise RuleFailed(f"accepted: {self.summary}" if self.status < 300 else self.summary)

    def ok_unless_refused(self, param: str) -> Any:
        """The JSON of a successful reply. If the server refused the request with an error that
        names `param`, the rule is skipped.
        """
        if self.status in REFUSALS and param in self.message:
            raise RuleSkipped(f"refused by name: {self.message[:120]}")
        return self.ok()

    @property
    def error(self) -> dict[str, Any]:
        """The error object, at the place where clients look for it. Fails the rule if there is
        none.
        """
        body = self.json()
        if not isinstance(body, dict) or not isinstance(body.get("error"), dict):
            raise RuleFailed(f"{self.summary}: no error object")
        found: dict[str, Any] = body["error"]
        return found

    @property
    def message(self) -> str:
        """The server's error message, or the raw body if its shape is unknown."""
        try:
            body = json.loads(self.content)
        except ValueError:
            return self.content[:200].decode(errors="replace")
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
        return json.dumps(error)[:500]

    @property
    def summary(self) -> str:
        said = "" if self.status < 300 else f" ({self.message[:160]})"
        return f"HTTP {self.status}{said}"


class Target:
    def __init__(self, client: httpx.AsyncClient, model: str, context_length: int | None) -> None:
        self.client = client
        self.model = model
        self.context_length = context_length
        self.seen: list[Reply] = []
        self._once: dict[str, Any] = {}

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return await self.request("GET", path, headers=headers)

    async def delete(self, path: str) -> Reply:
        return await self.request("DELETE", path)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return await self.post_raw(path, json.dumps(body).encode(), headers)

    async def post_raw(
        self, path: str, content: bytes, headers: dict[str, str] | None = None
    ) -> Reply:
        kind = {"content-type": "application/json"}
        return await self.request("POST", path, content=content, headers=kind | (headers or {}))

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        answer = await self.client.request(method, path, **options)
        reply = Reply(answer.status_code, answer.headers, answer.content)
        self.seen.append(reply)
        return reply

    async def stream(self, path: str, body: dict[str, Any]) -> SseStream:
        """Send a streaming request and read the stream to its end. If the server refuses the
        request, the rule fails.
        """
        reply = await self.post(path, body | {"stream": True})
        if reply.status != 200:
            raise RuleFailed(reply.summary)
        return read_stream(reply.headers, reply.content)

    async def once(self, key: str, make: Callable[[], Awaitable[Value]]) -> Value:
        """The result of `make()`, or its error. `make` is called only for the first call with this
        `key`. Later calls with the same `key` get the same result or error.
        """
        if key not in self._once:
            try:
                self._once[key] = await make()
            except (RuleFailed, RuleSkipped) as ending:
                self._once[key] = ending
        kept = self._once[key]
        if isinstance(kept, RuleFailed | RuleSkipped):
            raise kept
        value: Value = kept
        return value

    def chat(self, content: Any = QUESTION, **fields: Any) -> dict[str, Any]:
        """The body of a small chat request. `fields` are added to it or replace its fields."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16}
        return {"model": self.model, "temperature": 0, **body} | fields

    def completion(self, prompt: Any = "The capital of France is", **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return body | fields

    async def plain_chat(self) -> Any:
        """One ordinary answer, requested once and shared by the rules that inspect its format."""

        async def ask() -> Any:
            return (await self.post(CHAT, self.chat())).ok()

        return await self.once("plain chat", ask)

    async def plain_stream(self) -> SseStream:
        return await self.once("plain stream", lambda: self.stream(CHAT, self.chat()))

    async def usage_stream(self) -> SseStream:
        body = self.chat(stream_options={"include_usage": True})
        return await self.once("usage stream", lambda: self.stream(CHAT, body))

    async def bad_request(self) -> Reply:
        """The server's reply to an obviously invalid request."""
        return await self.once("bad request", self._make_bad_request)

    async def _make_bad_request(self) -> Reply:
        return await self.post(CHAT, {"model": self.model, "messages": "not a list"})

    async def lacks(self, path: str, body: dict[str, Any]) -> str | None:
        """Why the server counts as lacking an optional endpoint; None if it has the endpoint."""
        reply = await self.post(path, body)
        return f"no {path} (HTTP {reply.status})" if reply.status in _MISSING else None
