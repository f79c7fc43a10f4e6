"""`engine deploy` to a real SSH server, with stand-ins for the machine's Python environment and its
systemd. The unit that it writes is started by its own command line.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import httpx
import pytest

from tests.live_server import free_port

ROOT = Path(__file__).parents[2]
# Makes an environment whose `engine` is the one under test, and whose pip only notes its arguments.
PYTHON = """#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec {python} "$@"; fi
mkdir -p "$3/bin"
cat > "$3/bin/python" <<X
#!/bin/sh
if [ "\\$1 \\$2" = "-m pip" ]; then echo "\\$@" > ~/pip; exit 0; fi
exec {python} "\\$@"
X
cat > "$3/bin/engine" <<X
#!/bin/sh
PYTHONPATH={root} exec {python} -m engine.cli.main "\\$@"
X
chmod +x "$3/bin/python" "$3/bin/engine"
"""
# Starts and stops the command of the unit file.
SYSTEMCTL = """#!/bin/sh
shift
unit=~/.config/systemd/user/engine.service
case "$1" in
restart)
    command=$(sed -n "s|^ExecStart=%h|$HOME|p" $unit)
    key=$(sed -n "s|^Environment=\\\\(.*\\\\)=%h|\\\\1=$HOME|p" $unit)
    env "$key" sh -c "exec $command" > ~/journal 2>&1 &
    echo $! > ~/pid;;
disable) kill "$(cat ~/pid)";;
is-failed) ! kill -0 "$(cat ~/pid)" 2>/dev/null;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home folder of a machine that `ssh target` reaches."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    for name, text in {
        "python3": PYTHON.format(python=sys.executable, root=ROOT),
        "systemctl": SYSTEMCTL,
        "loginctl": "#!/bin/sh\n",
        "journalctl": "#!/bin/sh\ncat ~/journal\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    environment = {
        "HOME": str(home),
        "PATH": f"{programs}:/usr/bin:/bin",
        "XDG_CACHE_HOME": cache,
    }

    async def handle(process: "asyncssh.SSHServerProcess[bytes]") -> None:
        child = await asyncio.create_subprocess_shell(
            process.command or "",
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await child.communicate(await process.stdin.read())
        process.stdout.write(out)
        process.stderr.write(error)
        process.exit(child.returncode or 0)

    async def listen() -> "asyncssh.SSHAcceptor":
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=asyncssh.import_authorized_keys(
                key.export_public_key().decode()
            ),
            process_factory=handle,
            encoding=None,
        )

    loop = asyncio.new_event_loop()
    acceptor = loop.run_until_complete(listen())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    (tmp_path / "config").write_text(
        f"Host target\n HostName 127.0.0.1\n Port {acceptor.get_port()}\n User someone\n"
        f" IdentityFile {tmp_path}/key\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
        " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    # OpenSSH reads its configuration from the home of the user, whatever $HOME says.
    wrapper = tmp_path / "local"
    wrapper.mkdir()
    (wrapper / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    (wrapper / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper}:{os.environ['PATH']}")
    yield home
    loop.call_soon_threadsafe(loop.stop)


def engine_deploy(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "engine.cli.main", "deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_model_is_served_there_and_removed_again(
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


def test_what_goes_wrong_is_told(machine: Path, tmp_path: Path) -> None:
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


def test_a_provisioned_machine_is_used(machine: Path) -> None:
    done = engine_deploy("--provision", r"printf made\ it\\ntarget\\n", "--remove")
    assert done.returncode == 0 and "from target" in done.stderr
