"""From a configuration file to a router, with nothing started."""

import tomllib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine.backends.custom.base_custom import CustomBackend
from engine.core.config import load_settings
from engine.core.config_tables import read_tables
from engine.core.errors import ConfigError
from engine.ipc.options import EngineOptions
from engine.routing.build import build_router
from engine.routing.on_demand import OnDemand
from engine.routing.router import Router

GOOD = "[backends.good]\nkind = 'native'\nmodel = 'm'\n"


def build(tmp_path: Path, toml: str) -> Router:
    path = tmp_path / "my.toml"
    path.write_text(toml, encoding="utf-8")
    return build_router(load_settings(path).settings, CollectorRegistry(), "my.toml")


def options_of(router: Router) -> list[EngineOptions]:
    made = [each.backend._make() for each in router.replicas if isinstance(each.backend, OnDemand)]
    return [each._options for each in made if isinstance(each, CustomBackend)]


def test_replicas_are_numbered_and_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = "engine.native.machine"
    monkeypatch.setattr(f"{machine}.default_threads", lambda: 8)
    router = build(
        tmp_path, GOOD + "replicas = 3\n[backends.one]\nkind='native'\nbackend_args={threads=5}\n"
    )
    assert [each.name for each in router.replicas] == ["good#1", "good#2", "good#3", "one"]
    assert [each.threads for each in options_of(router)] == [2, 2, 2, 5]
    assert {each.affinity for each in options_of(router)} == {"off"}
    assert [route.id for route in router.routes] == ["good", "one"]


def test_engine_settings_apply_to_each_backend_unless_it_has_its_own(
    tmp_path: Path,
) -> None:
    router = build(
        tmp_path,
        "[cache]\nblock_size = 32\n[performance]\nbatch_size = 7\n"
        + GOOD
        + "backend_args = { max_slots = 9 }\n",
    )
    (options,) = options_of(router)
    assert (options.block_size, options.max_slots, options.model_path) == (32, 9, "m")
    assert options.threads is None and options.affinity == "auto"


def test_a_models_backend_list_overrides_the_backends_weight(tmp_path: Path) -> None:
    models = "[models.m]\nbackends = ['good', { name = 'two', weight = 5 }]\n"
    router = build(tmp_path, GOOD + "weight = 2\n[backends.two]\nkind = 'native'\n" + models)
    assert [member.weight for member in router.routes[0].members] == [2, 5]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[backends.a]\nkind = 'natve'\n", "backends.a: unknown backend 'natve' (known: native"),
        (GOOD + "modl = 'x'\n", "backends.good: backend 'native' has no option 'modl'"),
        (GOOD + "backend_args = { thread = 1 }\n", "backends.good: unknown backend argument"),
        (GOOD + "backend_args = 3\n", "backends.good: backend 'native': Expected `object`"),
    ],
)
def test_unknown_backend_options_are_named_with_file_and_key(
    tmp_path: Path, toml: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, toml)
    assert str(caught.value).startswith(f"my.toml: {words}"), str(caught.value)


def test_the_routing_example_builds_a_router() -> None:
    path = Path(__file__).parents[3] / "examples" / "routing" / "engine.toml"
    router = build_router(load_settings(path).settings, CollectorRegistry(), str(path))
    assert [each.name for each in router.replicas] == ["fast#1", "fast#2"]


def test_the_routing_example_with_its_commented_parts_is_valid() -> None:
    text = (Path(__file__).parents[3] / "examples" / "routing" / "engine.toml").read_text()
    _, _, rest = text.partition("never here.\n")
    whole = text + "\n".join(line.removeprefix("#").strip() for line in rest.splitlines())
    tables = read_tables(tomllib.loads(whole), "example")
    assert list(tables.backends) == ["fast", "cloud", "gpu"]
    assert tables.models["other"].fallbacks == ("smol",)
