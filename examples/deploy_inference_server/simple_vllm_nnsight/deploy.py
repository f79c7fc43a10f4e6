"""Serve a model for interpretability research: the OpenAI API, activations and interventions.

    python deploy.py --model smollm2-135m-instruct
    python deploy.py --model Qwen/Qwen3-0.6B --python ~/vllm/bin/python

It first says what the vLLM of `--python` allows. vLLM has no request field for activations: its
nnsight integration runs inside a Python program, in eager mode, and is not served over HTTP. So the
API is served by the engine's own backend, and this script names exactly what vLLM lacks. It stays
until Ctrl-C.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

READY_TIMEOUT_S = 600.0
PROBE = """
import importlib.util, json
found = {}
for name in ("vllm", "nnsight", "torch"):
    if importlib.util.find_spec(name) is None:
        found[name] = None
        continue
    from importlib.metadata import version
    found[name] = version(name)
if found["torch"]:
    import torch
    found["cuda"] = torch.cuda.is_available()
print(json.dumps(found))
"""


def missing_in_vllm(python: str) -> list[str]:
    """What keeps activations of vLLM from being served, as sentences."""
    try:
        told = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=120)
        found = json.loads(told.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [f"{python} can't be asked: {error}"]
    lacks = []
    if found["vllm"] is None:
        lacks.append(f"vLLM is not installed for {python}: pip install vllm (it needs a GPU)")
    if found["nnsight"] is None:
        lacks.append(f"nnsight is not installed for {python}: pip install nnsight")
    if not found.get("cuda"):
        lacks.append("there is no CUDA device, which vLLM's nnsight integration needs")
    version = f" {found['vllm']}" if found["vllm"] else ""
    lacks.append(
        f"vLLM{version} takes no `interp` in its requests, and nnsight's traces of vLLM are Python "
        "code in the same process, one at a time, with enforce_eager: nothing that a server can "
        "put in front of it"
    )
    return lacks


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or a folder")
    parser.add_argument("--backend", default="auto", choices=("auto", "native", "torch", "jax"))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--once", action="store_true", help="read one activation, then end")
    args = parser.parse_args()
    for line in missing_in_vllm(args.python):
        print(f"vLLM: {line}", flush=True)
    command = [sys.executable, "-m", "engine.cli.main", "serve", args.model]
    command += ["--backend", args.backend, "--port", str(args.port), "--no-ui"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{args.port}"
    try:
        wait_until_ready(url, server)
        print(f"endpoint: {url}/v1", flush=True)
        print(f"activations: {url}/v1/interp/sites, {url}/v1/interp/run", flush=True)
        if args.once:
            print(f"residual stream after layer 0: {first_reading(url)}", flush=True)
        else:
            server.wait()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def first_reading(url: str) -> str:
    """Reads an activation as a client would."""
    body = {"prompt": "Hello", "interp": {"capture": [{"site": "blocks.0.hook_resid_post"}]}}
    request = urllib.request.Request(
        f"{url}/v1/interp/run", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (captured,) = json.load(answer)["interp"]["captures"]
    return f"{captured['shape']} values at positions {captured['positions']}"


if __name__ == "__main__":
    main()
