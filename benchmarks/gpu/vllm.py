"""Runs vLLM on the same lists of token ids, in a separate process; prints one JSON line per
workload.

It needs an environment with vLLM. The weights are random, with the same shape.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.workloads import FIGURES, MAX_POSITION, SHAPES, workloads

TIMEOUT_S = 1800


def is_installed() -> bool:
    return find_spec("vllm") is not None


def measure(model: str, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat by workload; "start" is import and construction."""
    command = [sys.executable, "-m", "benchmarks.gpu.vllm", model, "--repeats", str(repeats)]
    done = subprocess.run(
        [*command, "--workloads", *names],
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"workload"')]
    return {line["workload"]: line["seconds"] for line in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--workloads", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(SHAPES[given.model].config)))
        llm = _build(folder)
        _report("start", [time.perf_counter() - began])
        for name in given.workloads:
            _report(name, [_seconds(llm, given.model, name, seed) for seed in range(given.repeats)])


def _build(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_POSITION,
        enable_prefix_caching=True,
    )


def _seconds(llm: Any, model: str, name: str, seed: int) -> float:
    from vllm import SamplingParams

    workload = workloads(SHAPES[model], seed)[name]
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in workload.num_new
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def _report(name: str, seconds: list[float]) -> None:
    print(json.dumps({"workload": name, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
