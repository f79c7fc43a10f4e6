"""Serve a model for interpretability research: the OpenAI API, activations and interventions.

    python deploy.py --model Qwen/Qwen3-0.6B --python ~/vllm/bin/python
    python deploy.py --model smollm2-135m-instruct

If the vLLM of `--python` allows it, vLLM answers, and a server in front of it adds `interp`: hooks
in vLLM's workers capture and edit activations (worker_taps.py, front.py). Otherwise the script says
exactly what is missing, and the engine's own backend serves the model. It stays until Ctrl-C.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from engine.backends.vllm import VLLMBackend, VLLMConfig
from engine.core.errors import EngineError
from engine.core.store.model_store import resolve_model

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 600.0
# Asks an interpreter without importing vLLM, which takes seconds.
PROBE = """
import importlib.util, json, pathlib
from importlib.metadata import PackageNotFoundError, version
spec = importlib.util.find_spec("vllm")
found = {"vllm": None, "rpc": False, "extension": False}
if spec is not None:
    root = pathlib.Path(spec.submodule_search_locations[0])
    try:
        found["vllm"] = version("vllm")
    except PackageNotFoundError:
        found["vllm"] = "of an unknown version"
    sources = (root / "entrypoints").rglob("*.py")
    found["rpc"] = any('"/collective_rpc"' in each.read_text() for each in sources)
    options = root / "config" / "parallel.py"
    found["extension"] = options.exists() and "worker_extension_cls" in options.read_text()
print(json.dumps(found))
"""


def missing(python: str, model: str) -> list[str]:
    """What keeps vLLM from being served with `interp`, as sentences."""
    try:
        told = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=120)
        found = json.loads(told.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [f"{python} can't be asked: {error}"]
    if found["vllm"] is None:
        return [f"vLLM is not installed for {python}: pip install vllm, or give --python"]
    lacks, which = [], f"vLLM {found['vllm']}"
    if not found["extension"]:
        lacks.append(f"{which} has no --worker-extension-cls, which puts hooks into its workers")
    if not found["rpc"]:
        lacks.append(f"{which} has no /collective_rpc, by which a server can reach its workers")
    if is_gguf(model):
        lacks.append(f"{model} is a GGUF file, and vLLM needs a Hugging Face checkpoint")
    return lacks


def is_gguf(model: str) -> bool:
    try:
        return resolve_model(model).suffix.lower() == ".gguf"
    except EngineError:
        return False  # a name on the hub


def vllm_config(args: argparse.Namespace) -> VLLMConfig:
    return VLLMConfig(
        model_name=args.model,
        port=0,  # a Unix socket that only this user can reach
        python=args.python,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        # Hooks run in eager mode only. A cached prefix would not be computed, so not be captured.
        enforce_eager=True,
        enable_prefix_caching=False,
        backend_args={"worker_extension_cls": "worker_taps.InterpTaps"},
        # /collective_rpc can call all methods of a worker. The front does not pass it on.
        env={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(HERE)},
        start_timeout_s=READY_TIMEOUT_S,
    )


async def serve_vllm(args: argparse.Namespace) -> None:
    import httpx
    import uvicorn
    from front import Front

    backend = VLLMBackend(vllm_config(args))
    try:
        address = await backend.start()
        socket = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
        async with httpx.AsyncClient(
            transport=socket, base_url="http://vllm", timeout=600
        ) as client:
            app = Front(client, args.vectors).app
            server = uvicorn.Server(
                uvicorn.Config(app, "127.0.0.1", args.port, log_level="warning")
            )
            serving = asyncio.create_task(server.serve())
            while not server.started and not serving.done():
                await asyncio.sleep(0.05)
            if not serving.done():
                await asyncio.to_thread(tell, args, f"http://127.0.0.1:{args.port}")
                server.should_exit = args.once
            await serving
    except EngineError as error:
        sys.exit(f"error: {error}")
    finally:
        await backend.stop()


def serve_ours(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "engine.cli.main", "serve", args.model]
    command += ["--backend", args.backend, "--port", str(args.port), "--no-ui"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{args.port}"
    try:
        wait_until_ready(url, server)
        tell(args, url)
        if not args.once:
            server.wait()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"error: the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    server.terminate()
    sys.exit(f"error: the server was not ready after {READY_TIMEOUT_S:.0f} s")


def tell(args: argparse.Namespace, url: str) -> None:
    print(f"endpoint: {url}/v1", flush=True)
    print(f"activations: {url}/v1/interp/sites, {url}/v1/interp/run", flush=True)
    if args.once:
        print(f"residual stream after layer 0: {first_reading(url)}", flush=True)


def first_reading(url: str) -> str:
    """Reads an activation as a client would."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    interp = {"capture": [{"site": "blocks.0.hook_resid_post"}]}
    body = json.dumps({"model": model, "prompt": "Hello", "interp": interp}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/interp/run", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        (captured,) = json.load(answer)["interp"]["captures"]
    return f"{captured['shape']} values at positions {captured['positions']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or a folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--dtype", default="auto", help="vLLM's")
    parser.add_argument("--max-model-len", type=int, default=None, help="vLLM's")
    parser.add_argument("--vectors", type=Path, default=Path("vectors"), help="vector files")
    parser.add_argument(
        "--backend", default="auto", help="auto, native, torch or jax, if vLLM can't serve"
    )
    parser.add_argument("--once", action="store_true", help="read one activation, then end")
    args = parser.parse_args()
    args.python = shutil.which(os.path.expanduser(args.python)) or args.python
    lacks = missing(args.python, args.model)
    for line in lacks:
        print(f"vLLM: {line}", flush=True)
    try:
        if lacks:
            print("The engine's own backend serves the model.", flush=True)
            serve_ours(args)
        else:
            asyncio.run(serve_vllm(args))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)


if __name__ == "__main__":
    main()
