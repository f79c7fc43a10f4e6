"""`[backends.*]` and `[models.*]`: what they become, and how a mistake is answered."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.core.config import load_settings
from engine.core.config_schema import NamedTables
from engine.core.config_tables import POLICIES, BackendTable, ModelTable, ShadowTable, backends_of
from engine.core.errors import ConfigError

TWO = """
[backends.fast]
kind = "native"
model = "smol.gguf"
replicas = 2
max_concurrent = 64
tags = ["cpu"]
backend_args = { threads = 1 }
[backends.other]
kind = "openai"
base_url = "http://127.0.0.1:1/v1"
weight = 3
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(toml: str) -> NamedTables:
    Path("my.toml").write_text(toml, encoding="utf-8")
    return load_settings(Path("my.toml")).settings.tables


def complaint(toml: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(toml)
    message = str(caught.value)
    assert message.startswith("my.toml: ") and "\n" not in message
    return message


def test_router_keys_of_a_backend_table_are_separated_from_backend_options() -> None:
    backends = load(TWO).backends
    assert backends["fast"] == BackendTable(
        kind="native",
        model="smol.gguf",
        replicas=2,
        max_concurrent=64,
        tags=("cpu",),
        options={"backend_args": {"threads": 1}},
    )
    assert backends["other"].options == {"base_url": "http://127.0.0.1:1/v1"}


def test_without_models_tables_each_backend_is_a_model() -> None:
    assert list(load(TWO).models) == ["fast", "other"]


def test_a_model_lists_its_backends_by_name_or_tag() -> None:
    tables = load(
        TWO
        + """
[models."org/a"]
aliases = ["gpt-4o-mini"]
backends = ["fast", { name = "other", weight = 0.5 }]
policy = "session"
fallbacks = ["b"]
shadow = { backend = "other", share = 0.1 }
[models.b]
tags = ["cpu", "gpu"]
"""
    )
    first, second = tables.models.values()
    assert [(each.name, each.weight) for each in first.backends] == [("fast", None), ("other", 0.5)]
    assert first.shadow == ShadowTable(backend="other", share=0.1)
    assert [each.name for each in backends_of(second, tables)] == ["fast"]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[backends.a]\nmodel = 'm'", "backends.a.kind: must be given"),
        ("[backends.a]\nkind = 'native'\nreplicas = true", "backends.a.replicas: must not be true"),
        ("[backends.a]\nkind = 'native'\nreplicas = 0", "backends.a.replicas"),
        ("[backends.a]\nkind = 'native'\nweight = inf", "backends.a.weight"),
        ("[backends]\na = 1", "backends.a must be a table"),
        ("[backends.'a b']\nkind = 'native'", "'a b' can't be a name"),
        ("[modles.a]\n", "unknown section [modles]; did you mean models?"),
        (TWO + "[models.m]\nbackends = ['fsat']", "no backend 'fsat'; did you mean fast?"),
        (TWO + "[models.m]\nbackend = ['fast']", "unknown key backend; did you mean backends?"),
        (TWO + "[models.m]\ntags = ['gpu']", "models.m.tags: no backend has one of them"),
        (TWO + "[models.m]\naliases = ['x']", "models.m needs either backends"),
        (TWO + "[models.m]\nbackends = ['fast', 'fast']", "has 'fast' twice"),
        (
            TWO + "[models.m]\nbackends = ['fast']\npolicy = 'prefx'",
            "models.m.policy: must be 'round_robin', 'least_loaded'",
        ),
        (TWO + "[models.m]\nbackends = ['fast']", "backends.other is used by no model"),
        (TWO + "[models.m]\nbackends = ['fast']\nfallbacks = ['m']", "no other model 'm'"),
        (
            TWO + "[models.m]\nbackends = ['fast']\naliases=['n']\n[models.n]\nbackends=['other']",
            "'n' is a name of models.n already",
        ),
        (
            TWO + "[models.m]\nbackends = ['fast']\nshadow = { backend = 'othr' }",
            "models.m.shadow.backend: there is no backend 'othr'; did you mean other?",
        ),
        ("[models.m]\nbackends = ['fast']", "no [backends.*]"),
    ],
)
def test_an_invalid_table_is_reported_with_file_and_key(toml: str, words: str) -> None:
    assert words in complaint(toml)


@pytest.mark.parametrize(
    "option",
    [
        "api_key = 'abc'",
        "headers = { Authorization = 'Bearer abc' }",
        "headers = { x-api-key = 'abc' }",
        "env = { HF_TOKEN = 'abc' }",
        "backend_args = { password = 'abc' }",
        "base_url = 'https://me:abc@example.com/v1'",
    ],
)
def test_secrets_in_a_backend_table_are_refused(option: str) -> None:
    message = complaint(f"[backends.a]\nkind = 'openai'\n{option}\n")
    assert "must not hold" in message and "abc" not in message


def test_names_of_secret_files_and_variables_are_accepted() -> None:
    named = "api_key_file = '/run/key'\napi_key_env = 'KEY'\nbase_url = 'http://h:1/v1'"
    assert len(load(f"[backends.a]\nkind = 'openai'\n{named}").backends["a"].options) == 3


def test_policies_are_listed_once() -> None:
    assert get_args(ModelTable.model_fields["policy"].annotation) == POLICIES


@pytest.mark.parametrize("table", [BackendTable, ModelTable, ShadowTable])
def test_every_number_of_a_table_is_bounded(table: Any) -> None:
    for name, field in table.model_json_schema()["properties"].items():
        for part in field.get("anyOf", [field]):
            if part.get("type") in ("integer", "number"):
                assert {"minimum", "exclusiveMinimum"} & part.keys(), name
                assert {"maximum", "exclusiveMaximum"} & part.keys(), name


def test_config_show_lists_backend_tables() -> None:
    Path("engine.toml").write_text(TWO, encoding="utf-8")
    result = CliRunner().invoke(app, ["config", "show", "--json"])
    shown = json.loads(result.stdout)
    assert shown["backends.fast.replicas"] == {"value": 2, "origin": "engine.toml"}
    assert shown["backends.fast.weight"] == {"value": 1.0, "origin": "default"}
    assert shown["backends.other.base_url"]["value"] == "http://127.0.0.1:1/v1"
    assert shown["models.fast.policy"] == {"value": "prefix", "origin": "default"}
