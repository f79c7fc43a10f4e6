"""Compares a GGUF control vector here and in llama.cpp: the same file, the same strength.

`python -m benchmarks.features.control_vector --llama-server PATH` writes a control vector, asks
llama-server (`--control-vector-scaled`) and this engine for the log-probabilities after a few
prompts, and prints the largest differences, without and with the vector. First with the model's
weights and all arithmetic in float32, where the limit is LIMIT, and then with the file as it is:
both engines round activations of quantized weights, each in its way, so they differ without a
vector, too.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
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
STRENGTH = 1.5
LIMIT = 0.01  # of log-probabilities, in float32
FLOAT = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]

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


def ours(model: Path, vector: Path | None, is_float: bool) -> list[Scores]:
    found = []
    vectors = {} if vector is None else read_vectors(vector)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=NUM_TOP)
    with LLM(str(model), dtype="float32" if is_float else "auto") as llm:
        for prompt in PROMPTS:
            with llm.trace(prompt, sampling_params=params) as t:
                for site, values in vectors.items():
                    t.site(site).add(values, scale=STRENGTH)
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


def random_vector(file: Path, model: str) -> None:
    with LLM(model) as llm:
        layers, width = llm.num_layers, llm.card.num_dimensions
    rng = np.random.default_rng(0)
    vectors = {}
    for layer in range(1, layers):
        values = rng.normal(size=width).astype(np.float32)
        vectors[f"blocks.{layer}.hook_resid_post"] = values / np.linalg.norm(values) * NORM
    write_gguf(file, vectors, "llama")


def compare(server: Path, model: Path, vector: Path, is_float: bool) -> float:
    options = FLOAT if is_float else []
    plain = ours(model, None, is_float), theirs(server, model, *options)
    scaled = ("--control-vector-scaled", f"{vector}:{STRENGTH}")
    steered = ours(model, vector, is_float), theirs(server, model, *options, *scaled)
    print("in float32" if is_float else f"{model.name} as it is")
    print(f"  without a vector: {largest(*plain):.5f} at most between the two engines")
    print(f"  with the vector:  {largest(*steered):.5f}")
    print(f"  the vector moves: {largest(plain[0], steered[0]):.5f}", flush=True)
    return largest(*steered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    path = resolve_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        vector, whole = Path(folder) / "vector.gguf", Path(folder) / "float32.gguf"
        random_vector(vector, args.model)
        command = [sys.executable, "-m", "engine.cli.main", "convert", str(path), str(whole)]
        subprocess.run([*command, "--type", "F32"], check=True, stdout=subprocess.DEVNULL)
        found = compare(args.llama_server, whole, vector, is_float=True)
        compare(args.llama_server, path, vector, is_float=False)
    if found > LIMIT:
        sys.exit(f"{found:.5f} is more than {LIMIT}")


if __name__ == "__main__":
    main()
