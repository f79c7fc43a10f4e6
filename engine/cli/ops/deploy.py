"""`engine deploy HOST`: installs the engine on another machine by SSH and serves a model there.

The machine needs Python 3.11, systemd and an SSH server. Everything is in the home folder of the
SSH user: a virtual environment, the model, a key and a systemd unit of the user. Each step can be
repeated: a second deployment updates the first.
"""

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from engine import __version__
from engine.cli.console import messages, output
from engine.core.errors import ConfigError, UnavailableError

# Asking for a password would stop a deployment that nobody watches.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
FOLDER = ".local/share/engine"  # in the home of the SSH user
UNIT = "engine"
KEY_FILE = ".config/engine/api_key"

# What the machine is: a line each for its processor, its Python, systemd and its GPU.
LOOK = r"""
uname -sm
python3 -c 'import sys; print("python %d.%d" % sys.version_info[:2])' || echo "python none"
systemctl --user show-environment >/dev/null 2>&1 && echo "systemd yes" || echo "systemd no"
nvidia-smi -L 2>/dev/null | head -1 || true
"""

INSTALL = r"""
set -e
cd ~/{folder}
[ -x venv/bin/python ] || python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check "$(echo wheels/*.whl){extras}"
venv/bin/engine pull {model}
"""

MAKE_KEY = r"""
set -e
umask 077
mkdir -p ~/.config/engine
[ -s ~/{key_file} ] || \
    ~/{folder}/venv/bin/python -c 'import secrets; print(secrets.token_urlsafe(32))' > ~/{key_file}
"""

START = r"""
set -e
mkdir -p ~/.config/systemd/user
cat > ~/.config/systemd/user/{unit}.service
loginctl enable-linger >/dev/null 2>&1 || true
systemctl --user daemon-reload
systemctl --user enable --quiet {unit}
systemctl --user restart {unit}
"""

# The last lines of the log are printed if the server does not become ready in time.
WAIT = r"""
probe='import urllib.request as r; r.urlopen("http://127.0.0.1:{port}/readyz")'
for attempt in $(seq {timeout_s}); do
    ~/{folder}/venv/bin/python -c "$probe" >/dev/null 2>&1 && exit 0
    systemctl --user is-failed --quiet {unit} && break
    sleep 1
done
journalctl --user -u {unit} -n 20 --no-pager -o cat >&2
exit 1
"""

REMOVE = r"""
systemctl --user disable --now {unit} 2>/dev/null
rm -rf ~/.config/systemd/user/{unit}.service ~/{folder}/venv ~/{folder}/wheels
systemctl --user daemon-reload
"""

SERVICE = """\
[Unit]
Description=Language model server
After=network.target

[Service]
Type=notify
NotifyAccess=main
ExecStart=%h/{folder}/venv/bin/engine serve {arguments}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
WatchdogSec=120
TimeoutStartSec=infinity
TimeoutStopSec=90
KillMode=mixed
Environment=LLM_ENGINE_SERVER__API_KEY_FILE=%h/{key_file}
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


HostArgument = Annotated[
    str | None,
    typer.Argument(metavar="HOST", help="[USER@]HOST, or a name of your SSH configuration."),
]
PublicOption = Annotated[
    bool, typer.Option("--public", help="Listen on all its addresses. Default: on loopback only.")
]
WheelOption = Annotated[
    Path | None, typer.Option(help="The engine's wheel. Default: the newest in dist/.")
]
ExtrasOption = Annotated[
    str | None,
    typer.Option(help="Extras of the package. Default: torch if the machine has a GPU."),
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option("--arg", help="A further argument of `engine serve`; may be repeated."),
]
ProvisionOption = Annotated[
    str | None,
    typer.Option(help="Command that makes a machine and prints its HOST as the last line."),
]
TimeoutOption = Annotated[
    int, typer.Option("--timeout", min=1, max=86400, help="Seconds until it must be ready.")
]
RemoveOption = Annotated[
    bool, typer.Option("--remove", help="Stop the server and remove it. Models and key stay.")
]


def deploy(
    host: HostArgument = None,
    model: Annotated[str, typer.Option(help="The model to serve.")] = "smollm2-135m-instruct",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server there.")] = 8080,
    public: PublicOption = False,
    wheel: WheelOption = None,
    extras: ExtrasOption = None,
    arguments: ArgumentsOption = None,
    provision: ProvisionOption = None,
    timeout_s: TimeoutOption = 600,
    remove: RemoveOption = False,
) -> None:
    """Serve a model on another machine, which is reached by SSH."""
    if provision is not None:
        host = _provisioned(provision, host)
    if host is None:
        raise ConfigError("name a HOST, or a command with --provision", param="HOST")
    if host.startswith("-"):
        raise ConfigError(f"{host} is no host", param="HOST")
    remote = RemoteMachine(host)
    if remove:
        remote.run(REMOVE.format(folder=FOLDER, unit=UNIT))
        messages().print(f"Removed the server from {host}.")
        return
    chosen = wheel or _newest_wheel()
    if chosen is None or not chosen.is_file():
        raise ConfigError(
            "there is no wheel to install: build it with `make wheel`, or name one with --wheel",
            param="--wheel",
        )
    has_gpu = _check(remote)
    if extras is None:
        extras = "torch" if has_gpu else ""
    words = [model, "--port", str(port), "--host", "0.0.0.0" if public else "127.0.0.1"]
    if has_gpu and "torch" in extras.split(","):
        words += ["--backend", "torch", "--device", "cuda"]
    _install(remote, chosen, extras, model)
    _start(remote, [*words, *(arguments or ())], port, timeout_s)
    _tell(host, port, public)


class RemoteMachine:
    """A machine that is reached by SSH."""

    def __init__(self, host: str) -> None:
        self._host = host

    def run(self, script: str, stdin: bytes = b"", *, check: bool = True) -> str:
        """Run a shell script there and return its output. The output of errors is shown here."""
        # The user's own shell may be another one.
        command = [*SSH, "--", self._host, f"sh -c {shlex.quote(script)}"]
        try:
            done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=False)
        except FileNotFoundError:
            raise ConfigError("ssh is not installed here", param="HOST") from None
        if done.returncode == 255:
            raise UnavailableError(
                f"{self._host} can't be reached by SSH. Try: ssh {self._host} true"
            )
        if check and done.returncode != 0:
            raise UnavailableError(
                f"A step on {self._host} ended with status {done.returncode}; see above."
            )
        return done.stdout.decode(errors="replace")


def _provisioned(command: str, host: str | None) -> str:
    """Run the user's command that makes a machine. Its last line is the machine's host."""
    if host is not None:
        raise ConfigError("give either a HOST or --provision", param="--provision")
    try:
        words = shlex.split(command)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    except (ValueError, IndexError, OSError) as error:
        raise ConfigError(f"--provision can't be run: {error}", param="--provision") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        what = f"ended with status {done.returncode}" if done.returncode else "printed no host"
        raise ConfigError(f"the command of --provision {what}", param="--provision")
    return lines[-1].strip()


def _newest_wheel() -> Path | None:
    wheels = Path("dist").glob("engine-*.whl")
    return max(wheels, key=lambda each: each.stat().st_mtime, default=None)


def _check(remote: RemoteMachine) -> bool:
    """Look at the machine, and refuse one that can't serve. Returns whether it has a GPU."""
    lines = remote.run(LOOK).strip().splitlines()
    facts = dict(line.split(" ", 1) for line in lines[1:3])
    version = facts.get("python", "none")
    if not lines[0].startswith("Linux"):
        raise ConfigError(f"the machine runs {lines[0]}, and Linux is needed", param="HOST")
    if version == "none" or tuple(map(int, version.split("."))) < (3, 11):
        raise ConfigError(
            f"the machine needs Python 3.11 or newer as python3, and has {version}", param="HOST"
        )
    if facts.get("systemd") != "yes":
        raise ConfigError("the machine has no systemd for its users", param="HOST")
    gpu = lines[3] if len(lines) > 3 else ""
    told = gpu.partition(" (UUID")[0] or "no NVIDIA GPU"
    messages().print(f"{lines[0]}, Python {version}, {told}", highlight=False)
    return bool(gpu)


def _install(remote: RemoteMachine, wheel: Path, extras: str, model: str) -> None:
    messages().print(f"Copying {wheel.name} ...", highlight=False)
    place = f"~/{FOLDER}/wheels"
    name = shlex.quote(wheel.name)
    copy = f"rm -rf {place} && mkdir -p {place} && cat > {place}/{name}"
    remote.run(copy, wheel.read_bytes())
    messages().print(f"Installing it, and downloading {model} ...", highlight=False)
    wanted = f"[{extras}]" if extras else ""
    remote.run(INSTALL.format(folder=FOLDER, extras=wanted, model=shlex.quote(model)))
    remote.run(MAKE_KEY.format(folder=FOLDER, key_file=KEY_FILE))


def _start(remote: RemoteMachine, arguments: list[str], port: int, timeout_s: int) -> None:
    messages().print("Starting the server ...")
    quoted = " ".join(_unit_word(each) for each in arguments)
    unit = SERVICE.format(folder=FOLDER, arguments=quoted, key_file=KEY_FILE)
    remote.run(START.format(unit=UNIT), unit.encode())
    remote.run(WAIT.format(folder=FOLDER, unit=UNIT, port=port, timeout_s=timeout_s))


def _unit_word(word: str) -> str:
    """A word of a command line in a systemd unit."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _tell(host: str, port: int, public: bool) -> None:
    messages().print(f"Engine {__version__} is ready on {host}.", highlight=False)
    lines = [] if public else [f"ssh -N -L {port}:127.0.0.1:{port} {shlex.quote(host)} &"]
    where = host.rpartition("@")[2] if public else "127.0.0.1"
    lines.append(f"KEY=$(ssh {shlex.quote(host)} cat {KEY_FILE})")
    lines.append(f'curl http://{where}:{port}/v1/models -H "Authorization: Bearer $KEY"')
    output().print("\n".join(lines), highlight=False, soft_wrap=True)
