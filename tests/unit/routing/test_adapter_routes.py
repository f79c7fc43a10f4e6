"""LoRA adapters as they are served: over HTTP, behind the router, through idle unloading, and
limited to some keys. The backends compute nothing.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from engine.core.config import load_settings
from engine.core.config_tables import adapters_of
from engine.core.errors import ConfigError, InvalidRequestError, NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.core.key_file import add_key
from engine.routing.build import build_router
from engine.routing.on_demand import OnDemand
from engine.routing.policies import RoutedRequest
from engine.routing.residency import Residency
from engine.routing.router import Router
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.fakes.routed_replicas import answer, asking, replica, router
from tests.support.servers.live_server import LiveServer, live_server

ADMIN = "admin-key-0123456789abcdef"


class Tuned(FakeBackend):
    """A backend that takes any adapter, unless its path says otherwise."""

    def reset(self, *arguments: Any) -> None:
        super().reset(*arguments)
        self.paths: dict[str, str] = {}

    @property
    def adapters(self) -> Mapping[str, str]:
        return self.paths

    def models(self) -> list[ModelCard]:
        base = self.cards[0]
        made = [msgspec.structs.replace(base, id=name, parent=base.id) for name in self.paths]
        return [base, *made]

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        if name in self.paths and not replaces:
            raise InvalidRequestError("already", param="lora_name")
        if path == "/broken":
            raise InvalidRequestError("this adapter has NaN", param="lora_path")
        self.paths[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self.paths.pop(name, None) is None:
            raise NotFoundError("no such adapter", param="lora_name")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[LiveServer, str]]:
    """A server, and a key that may use one adapter only."""
    keys = tmp_path / "keys.json"
    key, _ = add_key(keys, "limited", models=["tuned"])
    with live_server(Tuned(), server={"keys_file": keys, "admin_key": ADMIN}) as made:
        yield made, key


def post(server: LiveServer, path: str, body: dict[str, Any], key: str = ADMIN) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"api-key": key})


def chat(server: LiveServer, model: str, key: str = ADMIN) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return post(server, "/v1/chat/completions", body, key)


def models(server: LiveServer, key: str = ADMIN) -> dict[str, Any]:
    told = httpx.get(f"{server.url}/v1/models", headers={"api-key": key}).json()["data"]
    return {each["id"]: each.get("parent") for each in told}


def test_adapters_are_loaded_and_unloaded_over_http(server: tuple[LiveServer, str]) -> None:
    live, limited = server
    body = {"lora_name": "tuned", "lora_path": "/somewhere"}
    assert post(live, "/v1/load_lora_adapter", body, limited).status_code == 403
    done = post(live, "/v1/load_lora_adapter", body)
    assert (done.status_code, done.text[:8]) == (200, "Success:")
    assert models(live) == {MODEL: None, "tuned": MODEL}
    again = post(live, "/v1/load_lora_adapter", body)
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    broken = {"lora_name": "other", "lora_path": "/broken"}
    assert "NaN" in post(live, "/v1/load_lora_adapter", broken).json()["error"]["message"]
    assert chat(live, "tuned").status_code == 200
    unload = {"lora_name": "tuned"}
    assert post(live, "/v1/unload_lora_adapter", unload).status_code == 200
    assert post(live, "/v1/unload_lora_adapter", unload).status_code == 404
    assert chat(live, "tuned").status_code == 404
    for missing in ({}, {"lora_name": "x"}, {"lora_path": "/x"}, body | {"more": 1}):
        assert post(live, "/v1/load_lora_adapter", missing).status_code in (400, 422)


def test_a_key_that_is_limited_to_an_adapter_sees_and_uses_nothing_else(
    server: tuple[LiveServer, str],
) -> None:
    live, limited = server
    for name in ("tuned", "secret"):
        post(live, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/somewhere"})
    assert set(models(live, limited)) == {"tuned"}
    assert chat(live, "tuned", limited).status_code == 200
    for name in (MODEL, "secret"):
        refused = chat(live, name, limited)
        assert refused.status_code == 404 and "secret" not in refused.text
        shown = httpx.get(f"{live.url}/v1/models/{name}", headers={"api-key": limited})
        assert shown.status_code == 404
    assert chat(live, "secret").status_code == 200


def two_models() -> tuple[Router, list[Tuned]]:
    from engine.routing.policies import make_policy
    from engine.routing.replica import Member
    from engine.routing.route import Route

    backends = [Tuned() for _ in range(3)]
    parts = [replica(f"b{index}", each) for index, each in enumerate(backends)]
    made = router(*parts[:2])
    policy = make_policy("round_robin")
    made.add(Route("other", [Member(parts[2], 1.0)], "round_robin", policy), parts[2])
    return made, backends


async def test_the_router_loads_an_adapter_into_all_backends_of_its_model() -> None:
    made, backends = two_models()
    with pytest.raises(InvalidRequestError, match="base_model_name is needed"):
        await made.load_adapter("tuned", "/a")
    with pytest.raises(NotFoundError, match="no model 'x'"):
        await made.load_adapter("tuned", "/a", base="x")
    with pytest.raises(InvalidRequestError, match="already"):
        await made.load_adapter("other", "/a", base="m")
    await made.load_adapter("tuned", "/a", base="m")
    assert [set(each.paths) for each in backends] == [{"tuned"}, {"tuned"}, set()]
    told = {card.id: (card.root, card.parent) for card in made.models()}
    assert told == {"m": (None, None), "other": (None, None), "tuned": ("m", "m")}
    resolved = made.resolve("tuned")
    assert resolved is not None and resolved.card.parent == "m" and made.resolve("x") is None
    for _ in range(4):
        await answer(made, asking(model="tuned"))
    assert [len(each.requests) for each in backends] == [2, 2, 0]
    assert {each.context.model for each in backends[0].requests} == {"tuned"}
    await made.unload_adapter("tuned")
    assert not any(each.paths for each in backends) and made.resolve("tuned") is None
    with pytest.raises(NotFoundError):
        await made.unload_adapter("tuned")


async def test_an_adapter_refused_by_one_backend_is_loaded_into_none() -> None:
    made, backends = two_models()

    async def refuse(*_: Any, **__: Any) -> None:
        raise InvalidRequestError("This model's backend serves no LoRA adapters.")

    backends[1].load_adapter = refuse  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="no LoRA"):
        await made.load_adapter("tuned", "/a", base="m")
    assert backends[0].paths == {}
    backends[0].paths["kept"] = "/kept"  # as one of the store, which a remote backend lacks
    for _ in range(3):
        await answer(made, asking(model="kept"))
    assert [len(each.requests) for each in backends] == [3, 0, 0]


def test_an_adapters_prompts_have_their_own_routing_prefixes() -> None:
    asked = asking(model="m")
    text = ({"role": "user", "content": "a" * 1000},)
    request = type(asked)(context=asked.context, messages=text)
    assert set(RoutedRequest(request).prompt.keys).isdisjoint(
        RoutedRequest(request, "tuned").prompt.keys
    )


async def test_adapters_are_reloaded_with_an_unloaded_model() -> None:
    backends: list[Tuned] = []

    def make() -> Tuned:
        backends.append(Tuned())
        backends[-1].paths["from settings"] = "/settings"
        return backends[-1]

    backend = OnDemand("m", make, Residency(None, None))
    await backend.start()
    await backend.load_adapter("tuned", "/a")
    await backend.load_adapter("gone", "/b")
    await backend.unload_adapter("from settings")
    await backend.unload(0)
    assert backend.adapters == {"tuned": "/a", "gone": "/b"}
    await backend.unload_adapter("gone")  # loads nothing
    assert not backend.is_loaded
    await backend.load()
    assert backends[1].paths == {"tuned": "/a"}
    await asyncio.sleep(0)
    await backend.stop()


TABLES = """
[backends.one]
kind = "native"
model = "smollm2-135m-instruct"
[backends.two]
kind = "native"
model = "smollm2-135m-instruct"
[models.first]
backends = ["one"]
[models.second]
backends = ["two"]
"""


def tables(folder: Path, text: str) -> Any:
    path = folder / "engine.toml"
    path.write_text(text)
    return load_settings(path).settings


def test_settings_name_the_base_model_of_an_adapter(tmp_path: Path) -> None:
    settings = tables(tmp_path, TABLES + '[adapters.tuned]\npath = "a"\nbase = "second"\n')
    assert adapters_of("one", settings.tables) == {}
    assert adapters_of("two", settings.tables) == {"tuned": str(tmp_path / "a")}
    build_router(settings, CollectorRegistry(), "engine.toml")
    for table, says in (
        ('path = "a"', "needs base, the id of its model: first, second"),
        ('path = "a"\nbase = "secnd"', "no model 'secnd'.*second"),
    ):
        with pytest.raises(ConfigError, match=says):
            tables(tmp_path, f"{TABLES}[adapters.tuned]\n{table}\n")
    with pytest.raises(ConfigError, match="models.first has this name"):
        tables(tmp_path, TABLES + '[adapters.first]\npath = "a"\nbase = "second"\n')
    remote = TABLES.replace('[backends.two]\nkind = "native"', '[backends.two]\nkind = "openai"')
    made = tables(tmp_path, remote + '[adapters.tuned]\npath = "a"\nbase = "second"\n')
    with pytest.raises(ConfigError, match="serves no LoRA"):
        build_router(made, CollectorRegistry(), "engine.toml")
