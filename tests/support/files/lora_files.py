"""LoRA adapters for tests: PEFT folders with random matrices, and places that load at once."""

import json
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from engine.runtime.groups.adapter_slots import AdapterSlots
from tests.support.files.safetensors_files import file_bytes

PREFIX = "base_model.model."


def peft_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    std: float = 0.1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A PEFT folder. `shapes` has (out, in) of each module, by its name in the base model."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for module, (rows, columns) in shapes.items():
        a = generator.normal(0, std, (rank, columns)).astype(np.float32)
        b = generator.normal(0, std, (rows, rank)).astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(file_bytes(tensors))
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(told | dict(config or {})))
    return folder


class InlinePlaces(AdapterSlots):
    """Loads adapters in the engine loop itself, so that a schedule is the same every time."""

    def _load(self, path: str) -> "Future[Any]":
        job: Future[Any] = Future()
        job.set_result(self._read_and_pack(path))
        return job
