"""The server that gets hostile requests: one tenant sends them, and another is innocent."""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.core.key_file import add_key
from tests.scoreboard.hostile import grpc_calls, observed
from tests.scoreboard.hostile.cases import Answer, Hostile
from tests.scoreboard.hostile.fields import Known
from tests.scoreboard.hostile.requests import GRPC, Generator
from tests.scoreboard.hostile.wire import send
from tests.scoreboard.http.bodies import MESSAGES
from tests.scoreboard.http.target import (
    ADMIN,
    ADMIN_KEY,
    CLIENT,
    KEY,
    MAX_ERROR_BYTES,
    NO_THROTTLE,
)
from tests.scoreboard.served_engine import MODEL, Served, served_engine
from tests.support.servers.live_server import free_port

REQUEST_TIMEOUT_S = 30.0
BOUND_S = REQUEST_TIMEOUT_S + 60  # then an answer counts as hung, even on a busy machine
ARGUMENTS = ("--batch-size", "8", "--memory-pool-size-mb", "256")
MAX_TOKENS = 2_048  # of the default model, so that long prompts do not take too long
SEEING_MODEL = "tiny-vision"
SHOWN_BYTES = 1_000
MAX_TRIES = 8  # to send a request without the fields that were refused
INTERNAL = b"The server failed to answer this request."
ID = re.compile(rb'"(?:id|request_id)":\s?"([a-z]+[_-][\w-]{6,80})"')


@dataclass
class Victim:
    served: Served
    silences: Path
    innocent_key: str
    generator: Generator
    grpc_port: int
    statuses: Counter[int] = field(default_factory=Counter)

    async def throw(self, hostile: Hostile) -> str | None:
        """Send a request. Returns what is wrong with the answer.

        If a field is refused, the request is sent again without it, so that the others get their
        turn.
        """
        key = ADMIN_KEY if hostile.as_admin else KEY
        for _ in range(MAX_TRIES):
            try:
                answer = await self._send(hostile, key)
            except TimeoutError:
                return f"hung: no answer within {BOUND_S:g} s"
            for id in ID.findall(answer.body[:20_000]):
                self.generator.known.learn(id.decode())
            self.statuses[answer.status] += 1
            if problem := fault_of(answer):
                return f"{problem} for {hostile.content[:SHOWN_BYTES]!r}"
            refused = _refused_fields(hostile, answer)
            if not refused:
                break
            smaller = hostile.without(refused, self.generator.least(hostile))
            if smaller.content == hostile.content:
                break
            hostile = smaller
        return None

    async def _send(self, hostile: Hostile, key: str) -> Answer:
        if hostile.method == GRPC:
            async with asyncio.timeout(BOUND_S):
                given = (hostile.target, hostile.content, key, hostile.seed)
                return await grpc_calls.call(self.grpc_port, *given)
        return await send(self.served.address, hostile, key, BOUND_S)


def _refused_fields(hostile: Hostile, answer: Answer) -> list[str]:
    """The fields of the body that a refusal names."""
    if hostile.body is None or not 400 <= answer.status < 500:
        return []
    named = re.search(rb'"param":\s?"((\w+)(?:\.\w+)?)', answer.body)
    if named is not None and named[2].decode() in hostile.body:
        return [named[1].decode()]
    words = set(re.findall(r"\w+", answer.body.decode("utf-8", "replace")))
    return [name for name in hostile.body if name in words]


def fault_of(answer: Answer) -> str | None:
    """What is wrong with an answer. A client may be refused, but not because of a bug."""
    told = f"{answer.status} {answer.body[:60]!r}"
    is_refusal = answer.status in (501, 507) or (answer.status == 503 and answer.retry_after)
    if (answer.status >= 500 and not is_refusal) or INTERNAL in answer.body:
        return f"server error: {told}"
    if answer.status >= 400 and len(answer.body) > MAX_ERROR_BYTES:
        return f"large error: {len(answer.body)} bytes, {told}"
    return None


@contextmanager
def attacked_server(*, sees: bool = False) -> Iterator[Victim]:
    """`engine serve` with all dialects, gRPC, and keys: with the default model, or with a tiny one
    that sees images.
    """
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
        folder, port = Path(name), free_port()
        key, _ = add_key(folder / "keys.json", "innocent")
        silences = folder / "silences.jsonl"
        silences.touch()
        settings = {
            "API_KEY": KEY,
            "ADMIN_KEY": ADMIN_KEY,
            "LIMITS__AUTH_FAILURES_PER_MINUTE": str(NO_THROTTLE),
            "SERVER__GRPC_PORT": str(port),
            "SERVER__KEYS_FILE": str(folder / "keys.json"),
            "SERVER__REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
        }
        env = {f"LLM_ENGINE_{name}": value for name, value in settings.items()}
        env[observed.FILE_VARIABLE] = str(silences)
        model, arguments = _seeing_model(folder) if sees else _default_model()
        with served_engine(
            *ARGUMENTS, *arguments, model=model, env=env, module=observed.__name__
        ) as served:
            served.headers = dict(ADMIN)
            known = Known(SEEING_MODEL if sees else MODEL, sees)
            _store_objects(served.url, known)
            generator = Generator(served.get("/openapi.json").json(), known)
            yield Victim(served, silences, key, generator, port)


def _default_model() -> tuple[str, tuple[str, ...]]:
    return MODEL, ("--max-sequence-length", str(MAX_TOKENS))


def _seeing_model(folder: Path) -> tuple[str, tuple[str, ...]]:
    from tests.parity import tiny_vision  # imports torch and transformers

    _, path = tiny_vision.servable("smolvlm", folder)
    return str(path), ("--name", SEEING_MODEL)


def _store_objects(url: str, known: Known) -> None:
    """Store an object of each kind, so that requests can name it."""
    with httpx.Client(base_url=url, headers=CLIENT, timeout=60) as client:

        def post(path: str, body: dict[str, Any]) -> str:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            id = str(answer.json().get("id") or answer.json()["request_id"])
            known.learn(id)
            return id

        model = {"model": known.model}
        one = {"max_tokens": 1}
        post("/v1/chat/completions", {**model, **one, "messages": MESSAGES, "store": True})
        post("/v1/responses", {**model, "input": "a", "max_output_tokens": 1})
        post("/v1/conversations", {"items": [{"role": "user", "content": "a"}]})
        capture = {"capture": [{"site": "hook_embed"}], "store": True}
        post("/v1/interp/run", {**model, "prompt": "a b c", "interp": capture})
        post(
            "/v1/uploads",
            {"filename": "a", "purpose": "batch", "bytes": 9, "mime_type": "application/jsonl"},
        )
        params = {**model, **one, "messages": MESSAGES}
        post("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})
        line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}'
        talk = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
        for purpose, content in (("batch", line), ("fine-tune", talk)):
            form = {"file": ("a.jsonl", content)}
            answer = client.post("/v1/files", files=form, data={"purpose": purpose})
            assert answer.status_code == 200, answer.text
            known.learn(answer.json()["id"])
