"""A client names files of the server only where it may, and no path makes the server walk a tree
(SEC-24; T1, T2).
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI

from engine.adapters.served import ServedAdapters
from engine.core.config_types import Dialect
from engine.core.errors import InvalidRequestError, ModelFormatError
from engine.core.interfaces.request import ControlReply
from engine.core.observability.metrics import Metrics
from engine.core.sandbox import checkpoint_validation as validation
from engine.core.store.adapter_store import adapters_directory
from engine.servers.app import create_app
from engine.servers.openapi import document
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.files.lora_files import peft_folder
from tests.support.servers.live_server import make_settings

# Fields of requests that sound like paths, and what they are. A new one needs a decision: a path
# must be checked as `lora_path` is, and added to `PATHS`.
PATHS = {"lora_path"}
IDS = {"file_id", "file_ids", "input_file_id", "training_file", "validation_file"}
NO_PATHS = {
    "file": "content, or refused",
    "files": "refused",
    "filename": "a label",
    "file_data": "content",
    "file_url": "refused",
    "profile": "no file",
}
SOUNDS = re.compile(r"path|file|dir(?!ect)|folder", re.IGNORECASE)
ADMIN = "admin-key-0123456789abcdef"


class Noting(FakeBackend):
    """Notes the paths of adapters."""

    def reset(self, *words: Any) -> None:
        super().reset(*words)
        self.loaded: list[str] = []

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        self.loaded.append(path)


def make_app(backend: FakeBackend, tmp_path: Path, **server: Any) -> FastAPI:
    settings = make_settings(
        server={"dialects": get_args(Dialect), **server},
        model={"adapter_directory": tmp_path / "allowed"},
        storage={"path": tmp_path / "kept"},
    )
    return create_app(settings, backend, Metrics(MODEL))


def client_for(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def names_in(schema: Any) -> Iterator[str]:
    """The names of all fields in an OpenAPI document, at any depth."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties", {})
        yield from properties if isinstance(properties, Mapping) else ()
        for each in schema.values():
            yield from names_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from names_in(each)


def test_every_path_like_request_field_is_known(tmp_path: Path) -> None:
    found = set(names_in(document(make_app(FakeBackend(), tmp_path))))
    sounding = {name for name in found if SOUNDS.search(name)}
    assert sounding <= PATHS | IDS | NO_PATHS.keys(), "decide what these are"
    assert sounding >= PATHS


@pytest.fixture
def hostile(tmp_path: Path) -> list[str]:
    """Paths that lead out of the folders in which a client may name files."""
    allowed = tmp_path / "allowed"
    peft_folder(tmp_path / "secret", {"model.layers.0.self_attn.q_proj": (8, 8)})
    allowed.mkdir()
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "loop").symlink_to(allowed / "loop")
    return [
        *("/", "/etc", "/etc/passwd", "/proc/self/root", "~", "~root", "~nobody-at-all", ".", ""),
        *("/absent", "x" * 4096, "a\x00b", "\ud800".encode("utf-8", "replace").decode()),
        *(str(tmp_path / "secret"), str(allowed / "link"), str(allowed / ".." / "secret")),
        *(str(allowed / "loop"), f"{allowed}-more", "hf:org/repo", "https://localhost/x"),
        str(adapters_directory() / ".." / ".."),
    ]


async def test_without_keys_adapters_are_loaded_only_from_the_servers_folders(
    tmp_path: Path, hostile: list[str]
) -> None:
    backend = Noting()
    peft_folder(tmp_path / "allowed" / "mine", {"model.layers.0.self_attn.q_proj": (8, 8)})
    async with client_for(make_app(backend, tmp_path)) as client:
        told = set()
        for path in hostile:
            body = {"lora_name": "a", "lora_path": path}
            answer = await client.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code in (400, 403), (path, answer.text)
            told.add(answer.text if answer.status_code == 403 else "")
        assert len(told) <= 2, "what is said depends on files elsewhere"
        assert not backend.loaded
        mine = str(tmp_path / "allowed" / "mine")
        body = {"lora_name": "a", "lora_path": mine}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert backend.loaded == [os.path.realpath(mine)]


async def test_an_admin_may_load_adapters_from_any_folder(
    tmp_path: Path, hostile: list[str]
) -> None:
    backend = Noting()
    app = make_app(backend, tmp_path, admin_key=ADMIN)
    path = str(tmp_path / "secret")
    async with client_for(app, authorization=f"Bearer {ADMIN}") as client:
        body = {"lora_name": "a", "lora_path": path}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert backend.loaded == [path]


class _NoEngine:
    async def load_adapter(self, path: str, timeout_s: float) -> ControlReply:
        raise AssertionError(path)


async def test_a_folder_that_is_not_an_adapter_is_not_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: list[str]
) -> None:
    def walked(*_: Any) -> Any:
        raise AssertionError("the tree was walked")

    monkeypatch.setattr(Path, "rglob", walked)
    served = ServedAdapters(_NoEngine())
    secret = str(tmp_path / "secret")
    for path in hostile:
        if os.path.realpath(path.replace("\x00", "")) == os.path.realpath(secret):
            continue  # it is an adapter
        with pytest.raises(InvalidRequestError):
            await served.add("a", path, MODEL)


def test_a_folder_with_too_many_files_is_refused_as_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}").touch()
    with pytest.raises(ModelFormatError, match="more than 3 files"):
        validation.identity_of(tmp_path)
