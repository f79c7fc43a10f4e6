"""Rates of the native kernels by number of threads, beside llama.cpp's on the same file.

    python -m benchmarks.kernels.scaling --threads 1 2 4 8 16 --llama-bin ~/llama.cpp/build/bin

The model has random Q4_1 weights and no tokenizer; speed does not depend on values. The engine runs
forward passes in process, and llama.cpp its `llama-batched-bench`, so no server is measured. Both
compute one prompt, then one token for each of 1, 8 and 32 sequences of about the same length. In
each round, both are measured one after the other, for every number of threads. The best round
counts. The last line says which share of the CPU time a hypervisor gave to other machines: on a
machine whose share is large, one thread that waits makes all others wait.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import machine, machine_line
from engine.native.execution.timing import runner_config, time_steps
from engine.native.machine import default_threads
from engine.weights.model import ModelSource, open_model

Q4_1 = gguf.GGMLQuantizationType.Q4_1
STREAMS = (1, 8, 32)
PROMPT, GENERATED = 128, 32  # tokens of a sequence before and during the measured steps
PREFILL = "prefill"
TRIES = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int


SHAPES = {
    "135m": Shape(576, 30, 9, 3, 1536, 49152),
    "1b": Shape(2048, 16, 32, 8, 8192, 32000),
    "tiny": Shape(64, 2, 2, 1, 128, 512),
}
Rates = dict[str, float]  # "prefill", "1", "8", "32": tokens per second


def write_model(shape: Shape, path: Path) -> None:
    """Writes a GGUF with random weights, unless it is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    for name, size in _matrices(shape):
        writer.add_tensor(name, _random_blocks(rng, *size), raw_dtype=Q4_1)
    for name in _norms(shape):
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of matrices, and their rows and columns."""
    hidden, mlp = shape.hidden, shape.mlp
    kv = hidden // shape.heads * shape.kv_heads
    layer = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    yield "token_embd.weight", (shape.vocab, hidden)
    for index in range(shape.layers):
        for name, size in layer.items():
            yield f"blk.{index}.{name}.weight", size


def _norms(shape: Shape) -> Iterator[str]:
    yield "output_norm.weight"
    for index in range(shape.layers):
        yield f"blk.{index}.attn_norm.weight"
        yield f"blk.{index}.ffn_norm.weight"


def _random_blocks(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of Q4_1 blocks: scale and minimum in half precision, then 16 bytes of nibbles."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 20), np.uint8)
    scale = 0.15 / np.sqrt(columns)
    blocks[:, :, :4] = np.array([scale, -7.5 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def of_ours(source: ModelSource, threads: int) -> Rates:
    def rate(tokens: int, is_prompt: bool) -> float:
        length = PROMPT if is_prompt else PROMPT + GENERATED // 2
        config = runner_config(tokens, 1 if is_prompt else tokens, length)
        timing = time_steps(source, replace(config, num_threads=threads), tokens, is_prompt)
        return tokens / timing.forward

    decode = {str(streams): rate(streams, is_prompt=False) for streams in STREAMS}
    return {PREFILL: rate(PROMPT, is_prompt=True)} | decode


def of_llama_cpp(folder: Path, model: Path, threads: int) -> Rates:
    """Its prefill rate is that of one sequence."""
    size = max(STREAMS) * (PROMPT + GENERATED)
    lengths = ["-npp", str(PROMPT), "-ntg", str(GENERATED), "-npl", ",".join(map(str, STREAMS))]
    command = [folder / "llama-batched-bench", "-m", model, "-c", str(size), "-fa", "on", *lengths]
    command += ["-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
    libraries = {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    for _ in range(TRIES):  # at its end it sometimes loses lines that it has printed
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=os.environ | libraries
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(lines) == len(STREAMS):
            break
    else:
        raise SystemExit(
            f"llama-batched-bench ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    decode = {str(line["pl"]): float(line["speed_tg"]) for line in lines}
    return {PREFILL: float(lines[0]["speed_pp"])} | decode


def best(rounds: Sequence[Rates]) -> Rates:
    return {name: max(each[name] for each in rounds) for name in rounds[0]}


def cpu_times() -> NDArray[np.float64]:
    """User, nice, system, idle, iowait, irq, softirq and steal time of all CPUs."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    return np.array(fields, np.float64)


def report(threads: int, ours: Rates, theirs: Rates | None) -> str:
    cells = [f"{threads:7}"]
    for name, rate in ours.items():
        ratio = f" {rate / theirs[name]:5.2f}x" if theirs else ""
        cells.append(f"{rate:9.1f}{ratio}")
    return "  ".join(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, default_threads()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-batched-bench")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/engine/peers/random")
    parser.add_argument("--output", type=Path, help="write the rates to this JSON file")
    options = parser.parse_args(arguments)
    model = options.folder / f"{options.shape}-Q4_1.gguf"
    write_model(SHAPES[options.shape], model)
    source = open_model(model)
    print(machine_line(machine()))
    print("threads  " + "  ".join(f"{name:>16}" for name in (PREFILL, *map(str, STREAMS))))
    before = cpu_times()
    ours: dict[int, list[Rates]] = {threads: [] for threads in options.threads}
    theirs: dict[int, list[Rates]] = {threads: [] for threads in options.threads}
    for _ in range(options.rounds):
        for threads in options.threads:
            ours[threads].append(of_ours(source, threads))
            if options.llama_bin:
                theirs[threads].append(of_llama_cpp(options.llama_bin, model, threads))
            if options.output:
                options.output.write_text(json.dumps({"ours": ours, "llama.cpp": theirs}, indent=1))
    for threads in options.threads:
        peer = best(theirs[threads]) if options.llama_bin else None
        print(report(threads, best(ours[threads]), peer))
    spent = cpu_times() - before
    print(f"stolen by other machines: {100 * spent[-1] / spent.sum():.1f} % of the CPU time")


if __name__ == "__main__":
    main()
