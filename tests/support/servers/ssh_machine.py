"""A machine that is reached by a real SSH server here, with a stand-in for systemd."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
import pytest

ROOT = Path(__file__).parents[3]
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
REAL_PYTHON = """#!/bin/sh
exec {python} "$@"
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


def _write_programs(folder: Path, has_pip: bool) -> None:
    for name, text in {
        "python3": (REAL_PYTHON if has_pip else PYTHON).format(python=sys.executable, root=ROOT),
        "systemctl": SYSTEMCTL,
        "loginctl": "#!/bin/sh\n",
        "journalctl": "#!/bin/sh\ncat ~/journal\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


async def _listen(key: asyncssh.SSHKey, environment: dict[str, str]) -> "asyncssh.SSHAcceptor":
    """An SSH server that runs commands in this environment, for clients with this key."""

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

    return await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=asyncssh.import_authorized_keys(key.export_public_key().decode()),
        process_factory=handle,
        encoding=None,
    )


@contextmanager
def ssh_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_pip: bool = False
) -> Iterator[Path]:
    """The home folder of a machine that `ssh target` reaches. Unless it has pip, its Python makes
    environments with the engine under test.
    """
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    _write_programs(programs, has_pip)
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    environment = {
        "HOME": str(home),
        "PATH": f"{programs}:/usr/bin:/bin",
        "XDG_CACHE_HOME": cache,
    }

    loop = asyncio.new_event_loop()
    acceptor = loop.run_until_complete(_listen(key, environment))
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
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
