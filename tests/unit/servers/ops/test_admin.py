"""The administrator's API and command: every change does what it says and is written down."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner, Result

from engine.cli.commands import app as cli
from engine.core.config_schema import Settings
from engine.core.errors import InvalidRequestError
from engine.core.key_file import add_key, read_keys
from engine.core.observability.metrics import Metrics
from engine.runtime.tiers.record import identity_of, root_key
from engine.servers.access.auth import SERVER
from engine.servers.app import create_app
from engine.servers.ops import audit as audit_module
from engine.servers.ops.audit import AuditLog
from engine.servers.ops.reload import reread
from engine.servers.ops.warming import tenants_of, warm
from engine.servers.serving.generation import OFFLINE_PRIORITY
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import (
    LiveServer,
    chat,
    live_server,
    make_settings,
    wait_until,
)

ADMIN = "admin-key-0123456789abcdef"


class Admin:
    """A server with keys, and the command that talks to it."""

    def __init__(self, server: LiveServer, keys_file: Path, storage: Path) -> None:
        self.server = server
        self.keys_file = keys_file
        self.audit_file = storage / "audit.jsonl"

    def run(self, *arguments: str, key: str | None = ADMIN) -> Result:
        environment = {"LLM_ENGINE_ADMIN_KEY": key or "", "LLM_ENGINE_API_KEY": ""}
        command = ["admin", "--url", self.server.url, *arguments]
        return CliRunner().invoke(cli, command, env=environment)

    def json(self, *arguments: str) -> Any:
        done = self.run("--json", *arguments)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def changes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Admin]:
    keys_file = tmp_path / "keys.json"
    add_key(keys_file, "first")
    with live_server(
        server={"keys_file": keys_file, "admin_key": ADMIN},
        storage={"path": tmp_path / "data"},
    ) as server:
        yield Admin(server, keys_file, tmp_path / "data")


def test_admin_status_and_models_are_reported(admin: Admin) -> None:
    assert admin.json("status")["ready"]
    assert admin.json("models")["models"][0]["id"] == MODEL
    assert MODEL in admin.run("models").stdout
    assert "draining" in admin.run("status").stdout


def test_new_and_removed_keys_take_effect_at_once(admin: Admin) -> None:
    made = admin.run("keys", "new", "bob", "--tenant", "team", "--requests-per-minute", "1")
    key = made.stdout.strip()
    headers = {"authorization": f"Bearer {key}"}
    url = f"{admin.server.url}/v1/chat/completions"
    statuses = [httpx.post(url, json=chat(), headers=headers).status_code for _ in range(2)]
    assert statuses == [200, 429]
    assert admin.run("limits", "--key", "bob", "--requests-per-minute", "5").exit_code == 0
    assert httpx.post(url, json=chat(), headers=headers).status_code == 200
    assert [each["name"] for each in admin.json("keys", "list")["keys"]] == ["first", "bob"]
    assert admin.run("keys", "remove", "bob").exit_code == 0
    assert httpx.post(url, json=chat(), headers=headers).status_code == 401
    refused = admin.run("keys", "remove", "first")
    assert refused.exit_code == 2 and "only key" in refused.output
    assert [each.name for each in read_keys(admin.keys_file)] == ["first"]
    text = admin.audit_file.read_text()
    assert key not in text
    assert [each["action"] for each in admin.changes()] == [
        *("keys.new", "keys.limits", "keys.remove", "keys.remove"),
    ]
    assert [each["result"] for each in admin.changes()] == ["ok", "ok", "ok", "conflict"]
    assert all(each["who"].startswith("admin@127.0.0.1") for each in admin.changes())
    assert stat.S_IMODE(os.stat(admin.audit_file).st_mode) == 0o600


def test_drain_and_undrain_change_readiness(admin: Admin) -> None:
    assert admin.run("drain").exit_code == 0
    assert httpx.get(f"{admin.server.url}/readyz").status_code == 503
    assert (admin.json("status")["ready"], admin.json("status")["draining"]) == (False, True)
    assert admin.run("undrain").exit_code == 0
    assert httpx.get(f"{admin.server.url}/readyz").status_code == 200
    admin.server.services.lifecycle.is_ending = True
    assert "shutting down" in admin.run("undrain").output


def test_limits_and_log_level_can_be_changed_at_runtime(admin: Admin) -> None:
    assert admin.json("limits", "--max-concurrent", "7")["limits"]["max_concurrent"] == 7
    assert admin.server.services.quotas.defaults.max_concurrent == 7
    assert admin.json("limits", "--max-concurrent", "0")["limits"]["max_concurrent"] is None
    level = admin.json("status")["log_level"]
    assert admin.json("log-level", "error")["level"] == "error"
    assert admin.server.backend.log_levels == ["error"]
    assert "Not told: an engine" in admin.run("log-level", "debug").stdout
    assert admin.json("log-level", "error")["before"] == "debug"
    assert admin.json("status")["log_level"] == "error"
    admin.run("log-level", level if level in ("debug", "info", "warning") else "warning")
    assert admin.run("log-level", "loud").exit_code == 2


def test_caches_are_warmed_for_every_tenant(admin: Admin, tmp_path: Path) -> None:
    add_key(admin.keys_file, "second", tenant="team")
    admin.run("reload")
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain text\n"quoted"\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    done = admin.json("cache", "warm", str(file))
    assert done["prompts"] == 6 and not done["errors"]
    requests = admin.server.backend.requests
    assert {request.context.params.max_tokens for request in requests} == {1}
    assert len({request.context.salt for request in requests}) == 2
    assert all(request.context.tenant == request.context.salt for request in requests)
    assert {request.context.priority for request in requests} == {OFFLINE_PRIORITY}
    admin.server.backend.requests.clear()
    assert admin.json("cache", "warm", str(file), "--tenant", "team")["prompts"] == 3
    admin.server.backend.refusal = InvalidRequestError("It is too long.")
    refused = admin.json("cache", "warm", str(file), "--tenant", "team")
    assert (refused["prompts"], refused["errors"]) == (0, ["It is too long."] * 3)
    assert "no tenant" in admin.run("cache", "warm", str(file), "--tenant", "x").output
    flushed = admin.run("cache", "flush")
    assert flushed.exit_code == 2 and "flushed" in flushed.output  # a fake has no cache


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": {}},
        {"messages": None},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
    ],
)
def test_objects_without_a_prompt_are_not_warmed(admin: Admin, prompt: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{admin.server.url}/v1/admin/cache/warm",
        json={"prompts": ["a", prompt]},
        headers={"authorization": f"Bearer {ADMIN}"},
    )
    assert answer.status_code == 400, answer.text
    assert not admin.server.backend.requests


def test_the_admin_command_explains_failures(admin: Admin) -> None:
    missing = admin.run("models", key=None)
    assert missing.exit_code == 2 and "LLM_ENGINE_ADMIN_KEY" in missing.output
    assert admin.run("unload", "nothing").exit_code == 2
    assert "no model nothing" in admin.run("unload", "nothing").output
    done = CliRunner().invoke(cli, ["admin", "--url", "http://127.0.0.1:1", "status"])
    assert done.exit_code == 1 and "--url" in done.output


def test_warm_up_prompts_of_a_file_are_computed_at_start(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("once\nupon a time\n")
    with live_server(cache={"warm_file": file}) as server:
        wait_until(lambda: len(server.backend.requests) == 2)
    assert {request.prompt for request in server.backend.requests} == {"once", "upon a time"}


@pytest.fixture
def reloading(tmp_path: Path) -> tuple[Any, Path, Callable[..., None]]:
    """An application whose settings can be written anew."""
    keys_file = tmp_path / "keys.json"
    add_key(keys_file, "first")
    current = {"server": {"keys_file": keys_file}, "storage": {"path": tmp_path / "data"}}
    written = [make_settings(**current)]

    def write(**sections: dict[str, Any]) -> None:
        written[0] = make_settings(**{**current, **sections})

    def read() -> Settings:
        return written[0]

    app = create_app(written[0], FakeBackend(), Metrics(MODEL), reread=read)
    return app.state.services, keys_file, write


async def test_tier_prefixes_are_warmed_for_their_own_tenants(
    reloading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, keys_file, _ = reloading
    add_key(keys_file, "second")
    await reread(services, "SIGHUP")
    ours, foreign = identity_of(("ours",)), identity_of(("foreign",))
    card = msgspec.structs.replace(services.find_model(None, SERVER), cache_identity=ours.hex())
    monkeypatch.setattr(type(services), "find_model", lambda self, name, principal: card)
    first, second = tenants_of(services)
    roots = [(foreign, first), (ours, second), (ours, "gone"), (ours, first), (ours, second)]
    prompts = [
        {"prompt": [number, 7], "root": root_key(*root).hex()} for number, root in enumerate(roots)
    ]
    done = await warm(services, prompts, [first, second], most=2)
    assert (done["prompts"], done["skipped"]) == (2, 2)
    asked = [(each.prompt[0], each.context.salt) for each in services.backend.requests]
    assert sorted(asked) == [(1, second), (3, first)]
    card = msgspec.structs.replace(card, cache_identity=None)
    assert (await warm(services, prompts, [first, second]))["skipped"] == len(prompts)


async def test_settings_are_reloaded_completely_or_not_at_all(reloading: Any) -> None:
    services, keys_file, write = reloading
    add_key(keys_file, "second")
    write(limits={"max_concurrent": 3}, cache={"block_size": 32})
    done = await reread(services, "SIGHUP")
    assert done["keys"] == 2 and done["needs_restart"] == ["cache.block_size"]
    assert services.quotas.defaults.max_concurrent == 3
    keys_file.write_text("{")
    write(limits={"max_concurrent": 9})
    with pytest.raises(Exception, match="keys.json"):
        await reread(services, "SIGHUP")
    assert services.quotas.defaults.max_concurrent == 3
    assert len(services.keys.credentials) == 2
    write(server={})
    with pytest.raises(Exception, match="no key any more"):
        await reread(services, "SIGHUP")
    lines = (services.settings.storage.directory / "audit.jsonl").read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines]
    assert results == ["ok", "config_error", "config_error"]


async def test_the_audit_log_is_bounded_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MAX_BYTES", 1000)
    log = AuditLog(tmp_path / "data")
    for number in range(20):
        async with log.change("me", "drain", f"n{number}\nforged"):
            pass
    files = {path.name: path for path in (tmp_path / "data").iterdir()}
    assert set(files) <= {"audit.jsonl", "audit.jsonl.1"}
    assert all(path.stat().st_size < 1400 for path in files.values())
    for path in files.values():
        assert all("forged" in json.loads(line)["target"] for line in path.read_text().splitlines())
    newest = [each["target"].partition("\n")[0] for each in await log.newest(2)]
    assert newest == ["n19", "n18"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    async with AuditLog(blocked / "data").change("me", "drain"):
        pass


@pytest.mark.parametrize("backend", ["nosuch", "no.such", "torch.nosuch"])
def test_an_unknown_backend_is_a_client_error(admin: Admin, backend: str) -> None:
    answer = httpx.post(
        f"{admin.server.url}/v1/admin/models/load",
        json={"model": "absent", "backend": backend},
        headers={"authorization": f"Bearer {ADMIN}"},
    )
    assert answer.status_code == 400
    assert f"unknown backend '{backend}'" in answer.json()["error"]["message"]
    assert admin.changes()[-1]["result"] == "invalid_request"
