"""Embeddings of all-MiniLM-L6-v2: the native kernels against ONNX Runtime, in turns, in one run.

    python -m benchmarks.kernels.encoder [--threads N]

Needs PyTorch, Transformers, onnx and onnxruntime. ONNX Runtime gets padded batches, as its users
send them. Both sides are timed in CPU time if there is one thread, because this varies less when
other processes share the cores.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.store.pull import pull
from engine.ipc.options import EngineOptions
from engine.native.execution.build import build_encoder, find_device
from engine.weights.model import open_model

MODEL = "all-minilm-l6-v2"
Texts = Sequence[tuple[int, ...]]
Encode = Callable[[Texts], NDArray[np.float32]]
CASES = {
    "1 text of 8 tokens": [8],
    "1 text of 32 tokens": [32],
    "1 text of 128 tokens": [128],
    "8 texts of 32 tokens": [32] * 8,
    "8 texts of 8 to 128 tokens": [8, 128, 20, 16, 40, 90, 12, 70],
}


def native(path: Path, threads: int) -> Encode:
    options = EngineOptions(model_path=str(path), framework="native", threads=threads)
    return build_encoder(open_model(path), options, find_device("cpu", "auto")).encode


def onnx_runtime(path: Path, threads: int) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        exported(path), options, providers=["CPUExecutionProvider"]
    )

    def encode(texts: Texts) -> NDArray[np.float32]:
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        mask = (np.arange(longest) < np.array([[len(text)] for text in texts])).astype(np.int64)
        inputs = {"ids": ids, "mask": mask, "types": np.zeros_like(ids)}
        (states,) = session.run(["states"], inputs)
        vectors = (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    return encode


def exported(path: Path) -> bytes:
    """The model as ONNX. The session then fuses its ops."""
    import io

    import torch
    from transformers import AutoModel

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            output = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)
            return output.last_hidden_state

    names, file = ["ids", "mask", "types"], io.BytesIO()
    ids = torch.ones(2, 8, dtype=torch.long)
    torch.onnx.export(
        States(),
        (ids, ids, torch.zeros_like(ids)),
        file,
        input_names=names,
        output_names=["states"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, "states")},
        opset_version=17,
        dynamo=False,
    )
    return file.getvalue()


def best(sides: Sequence[Encode], texts: Texts, clock: Callable[[], float]) -> list[float]:
    """The shortest time of each side in seconds. The sides run in turns."""
    times = [float("inf")] * len(sides)
    for _ in range(5):
        for index, encode in enumerate(sides):
            started = clock()
            encode(texts)
            times[index] = min(times[index], clock() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads: int = parser.parse_args().threads
    clock = time.thread_time if threads == 1 else time.perf_counter
    path = pull(MODEL)
    sides = (onnx_runtime(path, threads), native(path, threads))
    rng = np.random.default_rng(0)
    print(f"{'texts':<28} {'onnxruntime':>12} {'native':>9} {'ratio':>6} {'difference':>11}")
    for name, lengths in CASES.items():
        texts = [tuple(rng.integers(1000, 30000, length).tolist()) for length in lengths]
        theirs, ours = (encode(texts) for encode in sides)
        slow, fast = best(sides, texts, clock)
        worst = np.abs(theirs - ours).max()
        print(
            f"{name:<28} {slow * 1e3:9.2f} ms {fast * 1e3:6.2f} ms {slow / fast:6.2f} {worst:11.1e}"
        )


if __name__ == "__main__":
    main()
