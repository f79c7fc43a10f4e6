"""Which quant of a catalogue model is pulled: what fits, what is quick enough, and what it says."""

import subprocess
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, ResourceError
from engine.core.memory import MemoryRoom
from engine.core.store import fit
from engine.core.store.catalogue import CATALOGUE, CatalogueEntry
from engine.core.store.fit import (
    MachineMemory,
    best_quant,
    choose_quant,
    needed_bytes,
    this_machine,
)
from engine.core.store.pull import parse_spec

GB = 10**9
SMALL, MIDDLE, LARGE = (
    CATALOGUE[name] for name in ("qwen2.5-1.5b-instruct", "llama-3.1-8b-instruct", "qwen3-30b-a3b")
)


@pytest.mark.parametrize(
    ("entry", "machine", "chosen"),
    [
        (SMALL, MachineMemory(16 * GB, is_gpu=False), "Q8_0"),
        (SMALL, MachineMemory(5 * GB // 2, is_gpu=False), "Q4_K_M"),
        (MIDDLE, MachineMemory(64 * GB, is_gpu=False), "Q4_K_M"),  # more would be slow
        (MIDDLE, MachineMemory(9 * GB, is_gpu=False), "Q4_K_M"),
        (MIDDLE, MachineMemory(8 * GB, is_gpu=False), "Q3_K_M"),
        (MIDDLE, MachineMemory(12 * GB, is_gpu=True), "Q8_0"),
        (MIDDLE, MachineMemory(9 * GB, is_gpu=True), "Q5_K_M"),
        (MIDDLE, MachineMemory(4 * GB, is_gpu=True), None),
        (
            LARGE,
            MachineMemory(64 * GB, is_gpu=False),
            "Q6_K",
        ),  # a token uses a tenth of the weights
    ],
)
def test_best_quant_is_the_largest_that_fits_the_machine(
    entry: CatalogueEntry, machine: MachineMemory, chosen: str | None
) -> None:
    quant = best_quant(entry, machine)
    assert (quant and quant.name) == chosen
    if quant is not None:
        assert needed_bytes(entry, quant) <= machine.usable


def test_needed_bytes_include_the_kv_cache() -> None:
    entry, quant = MIDDLE, MIDDLE.quants[0]
    # 32 layers, keys and values, 8 heads of 128, 16 bits
    assert needed_bytes(entry, quant) - quant.size - (512 << 20) == 8192 * 32 * 2 * 8 * 128 * 2


def test_the_reason_for_a_quant_is_one_line() -> None:
    _, slow = choose_quant(MIDDLE, None, MachineMemory(64 * GB, is_gpu=False))
    assert slow.startswith("Q4_K_M: about ") and slow.endswith("Q5_K_M would be slow on a CPU")
    _, full = choose_quant(MIDDLE, None, MachineMemory(9 * GB, is_gpu=True))
    assert "9.0 GB of GPU memory" in full and full.endswith("Q6_K does not fit")
    _, best = choose_quant(SMALL, None, MachineMemory(64 * GB, is_gpu=False))
    assert best.endswith("the largest that is published")


def test_a_model_that_does_not_fit_is_refused_unless_a_quant_is_named() -> None:
    small = MachineMemory(2 * GB, is_gpu=False)
    with pytest.raises(ResourceError, match="does not fit here: Q3_K_M needs about .*--quant"):
        choose_quant(MIDDLE, None, small)
    quant, _ = choose_quant(MIDDLE, "q8_0", small)
    assert quant.name == "Q8_0"
    with pytest.raises(ConfigError, match="it has Q3_K_M, Q4_K_M"):
        choose_quant(MIDDLE, "Q1", small)
    with pytest.raises(ConfigError, match="one file only"):
        choose_quant(CATALOGUE["all-minilm-l6-v2"], "Q8_0", small)


def test_the_machines_memory_is_its_gpus_or_its_containers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '8192 MiB'\necho '81559 MiB'\necho '[N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(fit, "find_spec", lambda name: object())
    assert this_machine() == MachineMemory(81559 << 20, is_gpu=True)
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(subprocess.CalledProcessError):
        fit.query_gpus("memory.total")
    monkeypatch.setattr(fit, "memory_room", lambda: MemoryRoom(1000, 500))
    assert this_machine() == MachineMemory(1000, is_gpu=False)


def test_every_catalogue_entry_is_consistent() -> None:
    for entry in CATALOGUE.values():
        sizes = [quant.size for quant in entry.quants]
        assert sizes == sorted(sizes) and len(set(entry.sources)) == len(entry.sources)
        assert all(parse_spec(source).file for source in entry.sources if entry.quants)
        assert not entry.quants or (entry.kv_bytes > 0 and entry.context > 0)
        assert entry.quants or entry.size is not None
    assert len(CATALOGUE) >= 50
