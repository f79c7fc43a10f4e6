"""`engine deploy` to a real SSH server, with stand-ins for the machine's Python environment and its
systemd. The unit that it writes is started by its own command line.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.live_server import free_port
from tests.support.servers.ssh_machine import engine_deploy, ssh_machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ssh_machine(tmp_path, monkeypatch) as home:
        yield home


def test_deploy_serves_a_model_over_ssh_and_removes_it(
    machine: Path, tmp_path: Path, default_model: Path
) -> None:
    wheel = tmp_path / "engine-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    port = free_port()
    done = engine_deploy("target", "--wheel", str(wheel), "--port", str(port), "--arg=--no-ui")
    assert done.returncode == 0, done.stderr
    assert (machine / ".local/share/engine/wheels" / wheel.name).read_bytes() == b"a wheel"
    assert f"wheels/{wheel.name}" in (machine / "pip").read_text()
    key_file = machine / ".config/engine/api_key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = key_file.read_text().strip()
    assert key not in done.stdout + done.stderr
    url = f"http://127.0.0.1:{port}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert f"-L {port}:127.0.0.1:{port} target" in done.stdout
    assert engine_deploy("target", "--remove").returncode == 0
    assert not (machine / ".config/systemd/user/engine.service").exists()
    assert key_file.exists()


def test_deploy_failures_name_their_cause(machine: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "engine-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    for arguments, message in (
        (["target", "--wheel", "absent.whl"], "make wheel"),
        (["unknown.invalid", "--wheel", str(wheel)], "can't be reached by SSH"),
        (["--provision", "sh -c 'exit 3'"], "ended with status 3"),
        (["--provision", "absent-command"], "can't be run"),
        ([], "name a HOST"),
        (["target", "--wheel", str(wheel), "--model", "no-such-model"], "no-such-model"),
    ):
        done = engine_deploy(*arguments)
        assert done.returncode != 0 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_deploy_uses_the_machine_that_the_provision_command_prints(machine: Path) -> None:
    done = engine_deploy("--provision", r"printf made\ it\\ntarget\\n", "--remove")
    assert done.returncode == 0 and "from target" in done.stderr
