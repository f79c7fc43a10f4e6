"""Chooses the quant of a catalogue model that fits this machine, and says why.

A quant fits if its weights, the KV cache of a usable context and some working memory are within a
part of the memory: of the GPU if models run there, else of the machine or its container.
"""

import subprocess
from dataclasses import dataclass
from importlib.util import find_spec

from engine.core.errors import ConfigError, ResourceError
from engine.core.memory import memory_room
from engine.core.store.catalogue import CatalogueEntry, Quant
from engine.core.store.gpus import amd_gpus, has_rocm_torch, query_gpus

USABLE_CONTEXT = 8192  # tokens
_WORKING_BYTES = 512 << 20  # activations, buffers and the programs themselves
_RAM_PART, _GPU_PART = 0.75, 0.9
# A CPU reads all weights that a token uses for each token, at some 30 GB/s. More bytes than this
# would give fewer than ten tokens per second.
_CPU_READ_BYTES = 3_000_000_000
_GOOD_QUANT = "Q4_K_M"  # smaller quants are noticeably worse


@dataclass(frozen=True, slots=True)
class MachineMemory:
    memory: int  # bytes
    is_gpu: bool

    @property
    def usable(self) -> int:
        return int(self.memory * (_GPU_PART if self.is_gpu else _RAM_PART))

    def describe(self) -> str:
        return f"{_gb(self.memory)} of {'GPU memory' if self.is_gpu else 'memory'}"


def this_machine() -> MachineMemory:
    if find_spec("torch") is not None and (gpu := _gpu_memory()):
        return MachineMemory(gpu, is_gpu=True)
    return MachineMemory(memory_room().total, is_gpu=False)


def _gpu_memory() -> int:
    """The bytes of the largest GPU; 0 if there is none that answers."""
    if has_rocm_torch():
        return max((gpu.memory for gpu in amd_gpus()), default=0)
    try:
        rows = query_gpus("memory.total")
    except (OSError, subprocess.SubprocessError):
        return 0
    mebibytes = [row.removesuffix(" MiB") for row in rows]
    return max((int(text) << 20 for text in mebibytes if text.isdigit()), default=0)


def needed_bytes(entry: CatalogueEntry, quant: Quant) -> int:
    """The memory that a quant takes with the KV cache of a usable context."""
    tokens = min(USABLE_CONTEXT, entry.context)
    return quant.size + entry.kv_bytes * tokens + _WORKING_BYTES


def best_quant(entry: CatalogueEntry, machine: MachineMemory) -> Quant | None:
    """The best quant that fits. None if none fits. On a GPU it is the largest. On a CPU it is the
    largest that can be read quickly, or else the smallest with good quality.
    """
    fitting = [quant for quant in entry.quants if needed_bytes(entry, quant) <= machine.usable]
    least = next((quant.size for quant in entry.quants if quant.name == _GOOD_QUANT), 0)
    good = [quant for quant in fitting if quant.size >= least]
    if machine.is_gpu or not good:
        return fitting[-1] if fitting else None
    quick = [quant for quant in good if quant.size * entry.active <= _CPU_READ_BYTES]
    return quick[-1] if quick else good[0]


def choose_quant(
    entry: CatalogueEntry, wanted: str | None, machine: MachineMemory | None = None
) -> tuple[Quant, str]:
    """The quant to pull, and the reason for it in one line. `wanted` is the name of a quant."""
    if wanted is not None:
        return _named_quant(entry, wanted)
    machine = machine or this_machine()
    quant = best_quant(entry, machine)
    if quant is None:
        smallest = entry.quants[0]
        raise ResourceError(
            f"'{entry.name}' does not fit here: {smallest.name} needs about "
            f"{_gb(needed_bytes(entry, smallest))}, and {_gb(machine.usable)} of "
            f"{machine.describe()} are usable. `engine list` shows what fits; --quant "
            f"{smallest.name} pulls it anyway"
        )
    larger = [each for each in entry.quants if each.size > quant.size]
    why = "the largest that is published"
    if larger:
        fits = needed_bytes(entry, larger[0]) <= machine.usable
        why = (
            f"{larger[0].name} would be slow on a CPU" if fits else f"{larger[0].name} does not fit"
        )
    tokens = min(USABLE_CONTEXT, entry.context)
    return quant, (
        f"{quant.name}: about {_gb(needed_bytes(entry, quant))} with {tokens} tokens of context; "
        f"this machine has {machine.describe()}; {why}"
    )


def _named_quant(entry: CatalogueEntry, wanted: str) -> tuple[Quant, str]:
    for quant in entry.quants:
        if quant.name.lower() == wanted.lower():
            return quant, f"{quant.name}: as asked"
    names = ", ".join(quant.name for quant in entry.quants)
    there = f"it has {names}" if names else "it has one file only; leave --quant out"
    raise ConfigError(f"'{entry.name}' has no quant {wanted!r}: {there}", param="quant")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
