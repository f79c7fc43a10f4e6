"""Compares a GGUF control vector here and in llama.cpp: the same file, the same strength.

`python -m benchmarks.control_vector --llama-server PATH` writes a control vector, asks llama-server
(`--control-vector`) and this engine for the log-probabilities after a few prompts, and prints the
largest differences, without and with the vector. Both compute with quantized weights, so they
differ a little without a vector, too.
"""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from engine.core.store.model_store import resolve_model
from engine.library.steering import read_vectors, write_gguf
from engine.llm import LLM
from engine.sampling_params import SamplingParams

PROMPTS = ("The capital of France is", "Once upon a time there was a", "def add(a, b):\n    return")
NUM_TOP = 20
NORM = 1.0  # of the vector of each layer

Scores = dict[int, float]


def theirs(server: Path, model: Path, *options: str) -> list[Scores]:
    """Log-probabilities by token id, after each prompt."""
    port = free_port()
    command = [str(server), "-m", str(model), "--port", str(port), "-c", "256", "-np", "1"]
    env = os.environ | {"LD_LIBRARY_PATH": str(server.parent)}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, *options], stdout=quiet, stderr=quiet, env=env)
    (found,) = answers(f"http://127.0.0.1:{port}", "/health", process, {})
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(
    url: str, health: str, process: subprocess.Popen[bytes], *fields: dict[str, str]
) -> tuple[list[Scores], ...]:
    """Log-probabilities after each prompt, for requests with each of these additional fields. The
    server ends afterwards.
    """
    try:
        _wait(f"{url}{health}", process)
        return tuple([_scores(url, prompt, each) for prompt in PROMPTS] for each in fields)
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


def _scores(url: str, prompt: str, fields: dict[str, str]) -> Scores:
    body = fields | {"prompt": prompt, "n_predict": 1, "n_probs": NUM_TOP, "temperature": 0}
    data = json.dumps(body | {"cache_prompt": False}).encode()
    request = urllib.request.Request(
        f"{url}/completion", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        told = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    return {each["id"]: each["logprob"] for each in told}


def ours(model: str, vector: Path | None) -> list[Scores]:
    found = []
    vectors = {} if vector is None else read_vectors(vector)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=NUM_TOP)
    with LLM(model) as llm:
        for prompt in PROMPTS:
            with llm.trace(prompt, sampling_params=params) as t:
                for site, values in vectors.items():
                    t.site(site).add(values)
            output = t.output.output
            assert output is not None and output.outputs[0].logprobs is not None
            scores = output.outputs[0].logprobs[0]
            found.append({token: each.logprob for token, each in scores.items()})
    return found


def largest(first: list[Scores], second: list[Scores]) -> float:
    """The largest difference of tokens that are likely in both."""
    return max(
        abs(a[token] - b[token])
        for a, b in zip(first, second, strict=True)
        for token in a.keys() & b.keys()
        if a[token] > -6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    path = resolve_model(args.model)
    with LLM(args.model) as llm:
        layers, width = llm.num_layers, llm.card.num_dimensions
    rng = np.random.default_rng(0)
    vectors = {}
    for layer in range(1, layers):
        values = rng.normal(size=width).astype(np.float32)
        vectors[f"blocks.{layer}.hook_resid_post"] = values / np.linalg.norm(values) * NORM
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vector.gguf"
        write_gguf(file, vectors, "llama")
        plain = ours(args.model, None), theirs(args.llama_server, path)
        told = theirs(args.llama_server, path, "--control-vector", str(file))
        steered = ours(args.model, file), told
    print(f"without a vector: {largest(*plain):.4f} at most between the two engines")
    print(f"with the vector:  {largest(*steered):.4f}")
    print(f"the vector moves: {largest(plain[0], steered[0]):.4f}")


if __name__ == "__main__":
    main()
