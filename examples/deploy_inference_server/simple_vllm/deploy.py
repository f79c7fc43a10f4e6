"""Serve a model with vLLM and say where: on this machine, on a GPU host by SSH, or on a cloud.

    python deploy.py --model openai-community/gpt2
    python deploy.py --target ssh --host me@gpu-box --model Qwen/Qwen3-8B
    python deploy.py --target sky --gpu A100:1 --model Qwen/Qwen3-8B

The first two stay until Ctrl-C and take the server down with them. vLLM listens on the loopback
address only; a remote one is reached through an SSH tunnel, so that no port is open to the world.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from sky_task import sky_commands, sky_task

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().relative_to(ROOT)
REMOTE_FOLDER = ".engine-deploy"  # in the remote home
EXCLUDED = (".git", ".venv", ".vllm", "build", "dist", "__pycache__", ".*_cache")
TOKEN = "HF_TOKEN"  # for models that the Hugging Face hub gives only to those who asked
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
READY_TIMEOUT_S = 1800.0  # a first start downloads the weights


def main() -> None:
    args = parse_args()
    try:
        if args.target == "sky":
            deploy_to_cloud(args)
        elif args.target == "ssh":
            deploy_by_ssh(args)
        else:
            asyncio.run(deploy_here(args))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{shlex.join(error.cmd[:8])} ...` ended with status {error.returncode}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=("local", "ssh", "sky"), default="local")
    parser.add_argument("--model", default="openai-community/gpt2", help="hub name or folder")
    parser.add_argument("--port", type=int, default=8000, help="here; default: 8000")
    parser.add_argument("--python", default="", help="interpreter that has vLLM; default: this one")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs for one model")
    parser.add_argument("--host", help="ssh: [user@]host, or a name of your SSH configuration")
    parser.add_argument("--gpu", default="L4:1", help="sky: what to rent, as `sky show-gpus` names")
    parser.add_argument("--name", default="engine-vllm", help="sky: the cluster's name")
    parser.add_argument("--output", type=Path, default=Path("sky_task.yaml"), help="sky: the file")
    parser.add_argument("--dry-run", action="store_true", help="print every step, do none")
    parser.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target == "ssh" and not args.host:
        parser.error("--target ssh needs --host")
    if args.host is not None and args.host.startswith("-"):
        parser.error("--host must not begin with a dash")
    return args


async def deploy_here(args: argparse.Namespace) -> str:
    """Start vLLM as a supervised child, print its endpoint and stay until somebody ends this."""
    from engine.backends.vllm import VLLMBackend, VLLMConfig
    from engine.core.errors import EngineError

    config = VLLMConfig(
        model_name=args.model,
        host="127.0.0.1",
        port=args.port,
        python=args.python,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    backend = VLLMBackend(config)
    endpoint = f"http://127.0.0.1:{args.port}/v1"
    if args.dry_run:
        show("start vLLM, and again if it dies", backend.argv())
        print(f"endpoint: {endpoint}")
        return endpoint
    stop = stop_signal(args.until_eof)
    try:
        endpoint = f"{await backend.start()}/v1"
        print(f"endpoint: {endpoint}", flush=True)
        print(first_request(endpoint, backend.models()[0].id), flush=True)
        await stop.wait()
    except EngineError as error:
        sys.exit(f"error: {error}")
    finally:
        await backend.stop()
    return endpoint


def stop_signal(until_eof: bool) -> asyncio.Event:
    """Set by SIGTERM or SIGHUP; `until_eof`: also when whoever started us by SSH has gone."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if until_eof:

        def read() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                stop.set()

        loop.add_reader(0, read)
    return stop


def deploy_by_ssh(args: argparse.Namespace) -> str:
    """Copy this repository to the host, install it with vLLM, start it there, open a tunnel."""
    endpoint = f"http://127.0.0.1:{args.port}/v1"
    copy = ["rsync", "-az", "--delete", *(f"--exclude={name}" for name in EXCLUDED)]
    copy += ["-e", shlex.join(SSH), f"{ROOT}/", f"{args.host}:{REMOTE_FOLDER}/src/"]
    forward = f"127.0.0.1:{args.port}:127.0.0.1:{args.port}"
    serve = [*SSH, "-o", "ExitOnForwardFailure=yes", "-L", forward, args.host, "bash", "-s"]
    steps: list[tuple[str, list[str], str]] = [
        ("make room", [*SSH, args.host, f"mkdir -p {REMOTE_FOLDER}/src"], ""),
        ("copy this repository", copy, ""),
        ("install it with vLLM", [*SSH, args.host, "bash", "-s"], install_script()),
    ]
    serving = "serve, behind a tunnel"
    if args.dry_run:
        shown = token_line(is_shown=True) + serve_script(args)
        for title, command, script in (*steps, (serving, serve, shown)):
            show(title, command, script)
        print(f"endpoint: {endpoint}")
        return endpoint
    for title, command, script in steps:
        print(f"{title} ...", file=sys.stderr)
        subprocess.run(command, input=script, text=True, check=True)
    print(f"{serving} ...", file=sys.stderr)
    with running(serve, token_line(is_shown=False) + serve_script(args)) as process:
        model = wait_until_ready(endpoint, process)
        print(f"endpoint: {endpoint}", flush=True)
        print(first_request(endpoint, model), flush=True)
        sys.exit(process.wait())


def install_script() -> str:
    venv = f"$HOME/{REMOTE_FOLDER}/venv"
    return "\n".join(
        (
            "set -e",
            f'[ -x "{venv}/bin/python" ] || python3 -m venv "{venv}"',
            f'exec "{venv}/bin/python" -m pip install --quiet -U "$HOME/{REMOTE_FOLDER}/src" vllm',
            "",
        )
    )


def serve_script(args: argparse.Namespace) -> str:
    """This same file, run there with the local target; it ends when the connection does."""
    flags = [*server_flags(args), "--until-eof"]
    python = f'"$HOME/{REMOTE_FOLDER}/venv/bin/python"'
    script = f'"$HOME/{REMOTE_FOLDER}/src/{HERE.as_posix()}"'
    return f"exec {python} {script} {shlex.join(flags)}\n"


def server_flags(args: argparse.Namespace) -> list[str]:
    """For this same script, where the model is to run."""
    flags = ["--model", args.model, "--port", str(args.port), "--dtype", args.dtype]
    flags += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    if args.max_model_len is not None:
        flags += ["--max-model-len", str(args.max_model_len)]
    return flags


def token_line(*, is_shown: bool) -> str:
    """The hub's token goes through standard input: a command line can be read by other users."""
    token = os.environ.get(TOKEN)
    if not token:
        return ""
    return f"export {TOKEN}={'(as it is here)' if is_shown else shlex.quote(token)}\n"


@contextlib.contextmanager
def running(command: list[str], script: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has read `script`, and ends with this block: its input is closed then."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        process.stdin.write(script)
        process.stdin.flush()
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(endpoint: str, process: subprocess.Popen[str]) -> str:
    """The id of the model that is served there, once it is."""
    import json

    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"error: the remote server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{endpoint}/models", timeout=5) as reply:
                return str(json.load(reply)["data"][0]["id"])
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    sys.exit(f"error: the server was not ready within {READY_TIMEOUT_S:.0f} s")


def deploy_to_cloud(args: argparse.Namespace) -> str:
    """Write a SkyPilot task, and say how to launch it; renting and billing are SkyPilot's."""
    needs_token = TOKEN in os.environ
    task = sky_task(
        args.name, args.gpu, ROOT, HERE, server_flags(args), TOKEN if needs_token else None
    )
    if args.dry_run:
        print(task)
    else:
        args.output.write_text(task, encoding="utf-8")
        print(f"wrote {args.output}")
    for title, command in sky_commands(args.name, args.output, args.port, TOKEN, needs_token):
        show(title, command)
    endpoint = f"http://127.0.0.1:{args.port}/v1"
    print(f"endpoint, once the tunnel is open: {endpoint}")
    return endpoint


def show(title: str, command: list[str], script: str = "") -> None:
    print(f"# {title}\n{shlex.join(command)}")
    print("".join(f"    {line}\n" for line in script.splitlines()), end="")


def first_request(endpoint: str, model: str) -> str:
    body = f'{{"model": "{model}", "prompt": "Hello", "max_tokens": 16}}'
    return f"  curl {endpoint}/completions -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    main()
