"""Compares a GGUF LoRA adapter here and in llama.cpp: the same base model, the same adapter.

`python -m benchmarks.adapters.llamacpp --llama-server PATH` stores the base model in float32,
writes an adapter of all matrices with random values, and starts both servers with `--lora`. It asks
both for the log-probabilities after a few prompts, without and with the adapter. Exits with 1 if
they differ by more than the tolerance.
"""

import argparse
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.features.control_vector import FLOAT, Scores, answers, free_port, largest, theirs
from engine.conversion.convert import convert
from engine.conversion.gguf_writer import gguf_bytes
from engine.conversion.stored import TargetTensor
from engine.core.store.model_store import resolve_model
from engine.weights.gguf import open_gguf

RANK, ALPHA, STD = 8, 16.0, 0.05
TOLERANCE = 1e-3  # of log-probabilities
CHANGED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_adapter(path: Path, base: Path) -> None:
    """A GGUF adapter as `convert_lora_to_gguf.py` names its tensors."""
    rng = np.random.default_rng(0)
    tensors = []
    with closing(open_gguf(base)) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            if name.removesuffix(".weight").rpartition(".")[2] not in CHANGED:
                continue
            rows, columns = tensor.shape
            for kind, shape in (("lora_a", (RANK, columns)), ("lora_b", (rows, RANK))):
                values = rng.normal(0, STD, shape).astype(np.float32).view(np.uint8)
                pieces = partial(iter, [values])
                tensors.append(TargetTensor(f"{name}.{kind}", shape, "F32", pieces))
        metadata = {
            "general.type": "adapter",
            "general.architecture": str(checkpoint.metadata["general.architecture"]),
            "adapter.type": "lora",
            "adapter.lora.alpha": ALPHA,
        }
    with path.open("wb") as file:
        for piece in gguf_bytes(metadata, tensors):
            file.write(piece.tobytes())


def ours(model: Path, adapter: Path) -> tuple[list[Scores], list[Scores]]:
    """The base model and the adapter, from one server."""
    port = free_port()
    command = [sys.executable, "-m", "engine.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--lora", f"tuned={adapter}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    return answers(url, "/readyz", process, {}, {"model": "tuned"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder) / "base.gguf", Path(folder) / "adapter.gguf"
        convert(resolve_model(given.model), base, dtype="F32")
        write_adapter(adapter, base)
        plain, tuned = ours(base, adapter)
        plain_apart = largest(plain, theirs(given.llama_server, base, *FLOAT))
        with_adapter = theirs(given.llama_server, base, *FLOAT, "--lora", str(adapter))
        tuned_apart = largest(tuned, with_adapter)
    print(f"without the adapter: {plain_apart:.6f} at most between the two engines")
    print(f"with the adapter:    {tuned_apart:.6f}")
    print(f"the adapter moves:   {largest(plain, tuned):.6f}")
    return int(tuned_apart > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
