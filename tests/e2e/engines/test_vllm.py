"""A real vLLM on this machine's CPU, behind our server: run by `make test-vllm`.

`VLLM_PYTHON` is an interpreter that has it, `VLLM_MODEL` the default model as a checkpoint that it
can load. A start takes a minute or two, so there are only three; the tests depend on their order.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from benchmarks.machine import vllm_dtype
from engine_tools.conformance.rules import GROUPS
from engine_tools.conformance.run import find_target, new_client, run_rules
from tests.support.servers.live_server import free_port
from tests.support.servers.served import ServedEngine, serve

pytestmark = pytest.mark.vllm
START_TIMEOUT_S = 600
INTERP_EXAMPLE = (
    Path(__file__).parents[3] / "examples/deploy_inference_server/simple_vllm_nnsight/deploy.py"
)
NUM_STREAMS = 32
# A server without a key and without CORS, that was never full, with a model for text alone.
EXPECTED_SKIPS = {
    *("ERR-19", "ERR-20", "ROB-08", "RRK-01", "RRK-02", "RRK-03"),
    *(f"EMB-{number:02}" for number in range(1, 15)),
}


def vllm_env() -> dict[str, str]:
    openmp = Path(os.environ["VLLM_PYTHON"]).parents[1] / "lib/libiomp5.so"
    preloads = [find_library("tcmalloc_minimal") or "", str(openmp) if openmp.exists() else ""]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(filter(None, preloads)),
    }


def vllm_options() -> list[str]:
    table = ", ".join(f'{name} = "{value}"' for name, value in vllm_env().items())
    options = {
        "python": f'"{os.environ["VLLM_PYTHON"]}"',
        "env": f"{{ {table} }}",
        "start_timeout_s": str(START_TIMEOUT_S),
        "dtype": f'"{vllm_dtype()}"',
        "max_model_len": "4096",
        "max_num_seqs": str(NUM_STREAMS),
        "enforce_eager": "true",  # compiling takes longer than all of these tests
        "tool_call_parser": '"hermes"',
    }
    return [word for pair in options.items() for word in ("--option", "=".join(pair))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    runtime = str(tmp_path_factory.mktemp("run"))
    given = (os.environ["VLLM_MODEL"], "--backend", "vllm", *vllm_options())
    env = {"XDG_RUNTIME_DIR": runtime}
    with serve(*given, env=env, timeout_s=START_TIMEOUT_S) as served:
        yield served


def family(server: ServedEngine) -> list[psutil.Process]:
    """The launcher, then vLLM's processes, its worker last."""
    (launcher,) = psutil.Process(server.process.pid).children()
    return [launcher, *launcher.children(recursive=True)]


def stream_to_the_end(
    server: ServedEngine, number: int, begun: list[int], endings: list[str]
) -> None:
    body = {
        "model": server.model,
        "prompt": f"Tell me a long story about the number {number}.",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = []
        for line in reply.iter_lines():
            if line.startswith("data: "):
                lines.append(line)
                begun.append(number)
    endings.append(lines[-1].removeprefix("data: "))


def test_vllm_loading_progress_is_logged(server: ServedEngine) -> None:
    assert any("vLLM is loading (" in line for line in server.log)
    assert any("[vllm]" in line for line in server.log)


@pytest.mark.timeout(1800)
async def test_every_conformance_rule_holds_for_vllm_behind_our_server(
    server: ServedEngine,
) -> None:
    async with new_client(server.url, None, timeout_s=120) as client:
        results = await run_rules(await find_target(client, None), GROUPS)
    broken = {r.rule.id: r.detail for r in results if r.outcome in ("fail", "advice")}
    skipped = {r.rule.id: r.detail for r in results if r.outcome == "skipped"}
    assert not broken
    assert set(skipped) == EXPECTED_SKIPS, skipped


@pytest.mark.parametrize("victim", [1, -1], ids=["its first process", "its worker"])
def test_kill_9_of_vllm_ends_every_stream_within_5_s_and_vllm_restarts(
    server: ServedEngine, victim: int
) -> None:
    begun: list[int] = []
    endings: list[str] = []
    threads = [
        threading.Thread(
            target=stream_to_the_end, args=(server, number, begun, endings), daemon=True
        )
        for number in range(NUM_STREAMS)
    ]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: len({*begun}) == NUM_STREAMS, 300)
    num_restarts, before = server.metric("engine_restarts_total"), family(server)
    before[victim].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    for thread in threads:
        thread.join(10)
    seconds = time.monotonic() - killed_at
    assert len(endings) == NUM_STREAMS and seconds < 5, (len(endings), seconds)
    assert all("error" in json.loads(ending) for ending in endings)
    server.wait_until(lambda: server.metric("engine_restarts_total") > num_restarts, 60)
    server.wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, START_TIMEOUT_S)
    assert not any(process.is_running() for process in before)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(model=server.model, prompt="The sky is", max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_sigkill_of_the_server_leaves_no_vllm_process_after_5_s(server: ServedEngine) -> None:
    processes = family(server)
    assert len(processes) >= 3
    os.kill(server.process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=5)
    assert not any(process.is_running() for process in processes)


def test_interp_example_reads_an_activation_of_vllm() -> None:
    model, python = os.environ["VLLM_MODEL"], os.environ["VLLM_PYTHON"]
    given = ["--model", model, "--python", python, "--dtype", vllm_dtype()]
    given += ["--max-model-len", "1024", "--port", str(free_port()), "--once"]
    done = subprocess.run(
        [sys.executable, str(INTERP_EXAMPLE), *given],
        env=os.environ | vllm_env(),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "residual stream after layer 0: [1, 576] values" in done.stdout
    assert "vLLM: " not in done.stdout, "it served the model by itself"
