"""Several keys, a separate one for administration, and whoever guesses is slowed down (SEC-21,
SEC-22; T1, T6).
"""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from engine.cli.commands import app as cli
from engine.core.errors import ConfigError, ConflictError, NotFoundError
from engine.core.key_file import add_key, read_keys, remove_key, set_limits
from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import KeyRing
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

USER, ADMIN = "user-key-0123456789abcdef", "admin-key-0123456789abcdef"


def app_with(backend: FakeBackend | None = None, **sections: dict[str, Any]) -> FastAPI:
    return create_app(make_settings(**sections), backend or FakeBackend(), Metrics(MODEL))


def client_for(app: FastAPI, key: str | None = None, address: str = "10.0.0.1") -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_new_key_is_long_shown_once_and_stored_only_as_a_hash(keys_file: Path) -> None:
    key, entry = add_key(keys_file, "alice", tenant="team")
    other, _ = add_key(keys_file, "bob")
    assert key != other and len(key) >= 43
    text = keys_file.read_text()
    assert key not in text and entry.sha256 in text
    assert stat.S_IMODE(os.stat(keys_file).st_mode) == 0o600
    assert [each.tenant_name for each in read_keys(keys_file)] == ["team", "bob"]
    assert "sha256" not in entry.public()


def test_keys_in_the_key_file_are_added_changed_and_removed_by_name(keys_file: Path) -> None:
    add_key(keys_file, "alice")
    with pytest.raises(ConflictError, match="alice"):
        add_key(keys_file, "alice")
    add_key(keys_file, "bob")
    assert set_limits(keys_file, "alice", {"max_concurrent": 3}).max_concurrent == 3
    assert [key.name for key in read_keys(keys_file)] == ["alice", "bob"]
    with pytest.raises(ConfigError, match="max_concurrent"):
        set_limits(keys_file, "alice", {"max_concurrent": 0})
    with pytest.raises(ConfigError, match="name"):
        add_key(keys_file, "no spaces")
    remove_key(keys_file, "alice")
    with pytest.raises(NotFoundError):
        remove_key(keys_file, "alice")
    assert [key.name for key in read_keys(keys_file)] == ["bob"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"keys": [{"name": "a"}]}',
        '{"keys": [{"name": "a", "sha256": "00"}]}',
        '{"keys": [{"name": "a", "sha256": "%s", "rpm": 1}]}' % ("0" * 64),
        '{"keys": [{"name": "a", "sha256": "%s", "max_queued": -1}]}' % ("0" * 64),
        '{"keys": [%s, %s]}' % (('{"name": "a", "sha256": "%s"}' % ("0" * 64),) * 2),
        '{"keys": []}',
    ],
)
def test_a_malformed_key_file_is_refused_by_name(keys_file: Path, content: str) -> None:
    keys_file.write_text(content)
    keys_file.chmod(0o600)
    with pytest.raises(ConfigError, match="keys.json"):
        app_with(server={"keys_file": keys_file})


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_key_file_writable_by_others_is_refused(keys_file: Path, mode: int) -> None:
    add_key(keys_file, "alice")
    keys_file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        app_with(server={"keys_file": keys_file})


async def test_a_keys_tenant_owns_objects_and_a_cache_namespace(keys_file: Path) -> None:
    first, _ = add_key(keys_file, "old", tenant="team")
    second, _ = add_key(keys_file, "new", tenant="team")
    stranger, _ = add_key(keys_file, "stranger")
    backend = FakeBackend()
    app = app_with(backend, server={"keys_file": keys_file, "api_key": USER})
    for key in (first, second, stranger, USER):
        async with client_for(app, key) as client:
            body = chat(cache_salt="chosen by the client") if key is second else chat()
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    contexts = [request.context for request in backend.requests]
    assert contexts[0].tenant == contexts[1].tenant  # no salt buys another share
    assert contexts[0].salt != contexts[1].salt
    assert len({context.tenant for context in contexts}) == 3
    assert all(context.tenant and context.salt for context in contexts)
    async with client_for(app, "ek-wrong") as client:
        assert (await client.get("/v1/models")).status_code == 401


async def admin_status(app: FastAPI, key: str | None, method: str = "GET") -> int:
    async with client_for(app, key) as client:
        path = "/v1/admin/routes" if method == "GET" else "/v1/admin/drain"
        return (await client.request(method, path, json={})).status_code


async def test_admin_routes_need_the_admin_key(keys_file: Path) -> None:
    named, _ = add_key(keys_file, "root", role="admin")
    add_key(keys_file, "user")
    server = {"api_key": USER, "admin_key": ADMIN, "keys_file": keys_file}
    app = app_with(server=server)
    assert await admin_status(app, USER) == 403
    assert await admin_status(app, None) == 401
    assert await admin_status(app, ADMIN) == 200
    assert await admin_status(app, named) == 200
    async with client_for(app, ADMIN) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_without_an_admin_key_clients_can_read_only_the_routes_report() -> None:
    app = app_with(server={"api_key": USER})
    assert await admin_status(app, USER) == 200
    assert await admin_status(app, USER, "POST") == 403
    async with client_for(app, USER) as client:
        for path in ("status", "models", "keys", "audit"):
            assert (await client.get(f"/v1/admin/{path}")).status_code == 403


async def test_with_only_an_admin_key_client_routes_stay_open() -> None:
    app = app_with(server={"admin_key": ADMIN})
    async with client_for(app) as client:
        assert (await client.get("/v1/models")).status_code == 200
    assert await admin_status(app, None) == 401
    assert await admin_status(app, ADMIN) == 200


def test_the_same_key_cannot_be_client_and_admin_key() -> None:
    with pytest.raises(ConfigError, match="twice"):
        app_with(server={"api_key": USER, "admin_key": USER})


async def test_failed_authentications_are_throttled_by_address() -> None:
    app = app_with(server={"api_key": USER}, limits={"auth_failures_per_minute": 5})
    async with client_for(app) as client:
        for number in range(8):
            guess = {"authorization": f"Bearer guess-{number}"}
            status = (await client.get("/v1/models", headers=guess)).status_code
            assert status == (401 if number < 5 else 429)
        refused = await client.get("/v1/models", headers=guess)
        assert int(refused.headers["retry-after"]) >= 1
        # Without a key nothing is guessed, and whoever has one is let in.
        assert (await client.get("/v1/models")).status_code == 401
        right = {"authorization": f"Bearer {USER}"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
    async with client_for(app, "guess", address="10.0.0.2") as client:
        assert (await client.get("/v1/models")).status_code == 401
    for address in ("2001:db8::1", "2001:db8::2"):
        async with client_for(app, "guess", address=address) as client:
            for _ in range(3):
                last = await client.get("/v1/models")
    assert last.status_code == 429  # one network


def test_engine_keys_creates_lists_and_removes_keys(keys_file: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.cli.main", "keys", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    made = run("new", "alice", "--file", str(keys_file), "--requests-per-minute", "60")
    assert made.returncode == 0 and made.stdout.startswith("ek-"), made.stderr
    listed = run("list", "--file", str(keys_file), "--json")
    assert '"requests_per_minute": 60' in listed.stdout and "sha256" not in listed.stdout
    again = run("new", "alice", "--file", str(keys_file))
    assert again.returncode == 2 and "already" in again.stderr
    assert run("remove", "alice", "--file", str(keys_file)).returncode == 0
    assert read_keys(keys_file) == ()


def test_a_key_file_without_a_client_key_is_refused(keys_file: Path) -> None:
    add_key(keys_file, "root", role="admin")
    server = make_settings(server={"keys_file": keys_file}).server
    with pytest.raises(ConfigError, match="no key for clients"):
        KeyRing(server)
    add_key(keys_file, "alice")
    assert KeyRing(server).has_users


def test_two_keys_with_one_name_are_refused(keys_file: Path) -> None:
    add_key(keys_file, "alice")
    add_key(keys_file, "bob")
    keys_file.write_text(keys_file.read_text().replace("bob", "alice"))
    with pytest.raises(ConfigError, match="same name"):
        read_keys(keys_file)


def test_every_limit_option_of_keys_new_is_stored(tmp_path: Path) -> None:
    names = (
        *("requests-per-minute", "tokens-per-minute", "max-concurrent"),
        *("max-queued", "max-queued-tokens"),
    )
    path = tmp_path / "keys.json"
    options = [part for index, name in enumerate(names, 3) for part in (f"--{name}", str(index))]
    done = CliRunner().invoke(cli, ["keys", "new", "bob", "--file", str(path), *options])
    assert done.exit_code == 0, done.output
    (entry,) = read_keys(path)
    assert [getattr(entry, name.replace("-", "_")) for name in names] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "role", "tenant"),
    [((), "user", "bob"), (("--admin", "--tenant", "team"), "admin", "team")],
)
def test_keys_new_stores_role_and_tenant(
    tmp_path: Path, options: tuple[str, ...], role: str, tenant: str
) -> None:
    path = tmp_path / "keys.json"
    done = CliRunner().invoke(cli, ["keys", "new", "bob", "--file", str(path), *options])
    assert done.exit_code == 0, done.output
    (entry,) = read_keys(path)
    assert (entry.role, entry.tenant_name) == (role, tenant)
