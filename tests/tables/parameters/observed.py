"""A server over a fake backend, and what can be seen of a request there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import httpx
import msgspec
from fastapi import FastAPI

from engine.core.config_presets import ParametersTable, PresetTable
from engine.core.config_types import Dialect
from engine.core.interfaces.backend import ChatRequest, CompletionRequest
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.servers.live_server import make_settings
from tests.tables.parameters.endpoints import Endpoint
from tests.tables.parameters.numbers import PRESET, PRESET_LIMIT

PLAIN_MODEL, PRESET_MODEL = MODEL, "tests/preset-model"


@dataclass(frozen=True)
class Seen:
    """What the client got, and what the backend was asked."""

    status: int
    text: str
    warnings: str
    requests: Sequence[ChatRequest | CompletionRequest]
    type: str = ""  # the content type

    @property
    def json(self) -> Any:
        """The answer; its text if it is not JSON."""
        return json.loads(self.text) if self.type == "application/json" else self.text

    @property
    def context(self) -> Any:
        assert self.status == 200 and self.requests, self.text[:300]
        return self.requests[0].context

    def parameter(self, name: str) -> Any:
        """A sampling parameter, or the priority, that reached the backend."""
        return getattr(self.context if name == "priority" else self.context.params, name)


class Server:
    def __init__(self, **server: Any) -> None:
        self.backend = FakeBackend()
        self.backend.cards = [CARD, msgspec.structs.replace(CARD, id=PRESET_MODEL)]
        parameters = ParametersTable(**PRESET, max_tokens=PRESET_LIMIT)
        settings = make_settings(server={"dialects": get_args(Dialect), **server})
        presets = {PRESET_MODEL: PresetTable(parameters=parameters)}
        tables = msgspec.structs.replace(settings.tables, presets=presets)
        settings = settings.model_copy(update={"tables": tables})
        self.app: FastAPI = create_app(settings, self.backend, Metrics(MODEL))
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def send(
        self, endpoint: Endpoint, given: dict[str, Any], model: str = PLAIN_MODEL
    ) -> Seen:
        self.backend.requests.clear()
        body = endpoint.body(given)
        if "{model}" not in endpoint.path:
            body = {"model": model} | body
        answer = await self.client.post(endpoint.path.format(model=model), json=body)
        warnings = answer.headers.get("x-engine-warnings", "")
        kind = answer.headers.get("content-type", "").partition(";")[0]
        return Seen(answer.status_code, answer.text, warnings, list(self.backend.requests), kind)


def nested(endpoint: Endpoint, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters where clients of this server put them."""
    return {endpoint.inside: given} if endpoint.inside and given else given
