"""A SkyPilot task that serves a model on a rented GPU. Strings are JSON, which is YAML too."""

import json
import shlex
from pathlib import Path, PurePath


def sky_task(
    name: str, gpu: str, root: Path, script: PurePath, flags: list[str], token: str | None
) -> str:
    """The task file's text. `token` names a secret that `sky launch --secret` passes on."""
    setup = "python3 -m venv ~/venv && ~/venv/bin/python -m pip install --quiet . vllm"
    run = f"~/venv/bin/python {shlex.quote(script.as_posix())} {shlex.join(flags)}"
    lines = [
        f"name: {json.dumps(name)}",
        f"workdir: {json.dumps(str(root))}",
        "resources:",
        f"  accelerators: {json.dumps(gpu)}",
        "  disk_size: 256",
        *([f"secrets:\n  {token}: null"] if token else []),
        f"setup: {json.dumps(setup)}",
        f"run: {json.dumps(run)}",
    ]
    return "\n".join(lines) + "\n"


def sky_commands(
    name: str, task: Path, port: int, token: str, needs_token: bool
) -> list[tuple[str, list[str]]]:
    """What to type, in order. The cluster's name is in the SSH configuration once it is up."""
    secret = ["--secret", token] if needs_token else []
    forward = f"127.0.0.1:{port}:127.0.0.1:{port}"
    return [
        ("rent the machine and serve", ["sky", "launch", "-c", name, *secret, str(task)]),
        ("a tunnel to it", ["ssh", "-N", "-L", forward, name]),
        ("give the machine back", ["sky", "down", name]),
    ]
