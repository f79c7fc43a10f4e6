"""The CPU resources of this process: cores, NUMA nodes, the container's CPU quota, and the speed of
the kernels.

As a program, this module measures the kernels and prints a `Speed` as JSON. `engine doctor` runs it
in a separate process, because kernels of a broken build may crash.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError

_SYS = Path("/sys")
_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_INT8, _BF16 = 1, 2  # codes in csrc/base/kernels.h for the arithmetic of a matmul
_TOKENS, _SIDE = 128, 1024  # the timed matmul: tokens, and rows and columns of the matrix
# Bytes that all threads of the memory bandwidth test read together, unless the min per thread makes
# it more. Most CPU caches hold less than this. Memory of this size is still quick to fill.
_READ_BYTES = 128 * 2**20
_READ_BYTES_PER_THREAD = 16 * 2**20
_PIECE_BYTES = 2 * 2**20
_PERIOD = 4096  # test weights repeat after this many random bytes


class Core(msgspec.Struct, frozen=True):
    """A physical core. `cpus` are its logical CPUs that this process may use, ascending."""

    node: int
    cpus: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True):
    """Where compute threads run. If threads of several NUMA nodes compute, each node gets a copy of
    the weights that its threads multiply by, and the KV cache is spread over the nodes.
    """

    cpus: tuple[tuple[int, ...], ...] = ()  # the CPUs of each thread; empty: threads are not bound
    nodes: tuple[int, ...] = ()  # the node of each thread; empty: they are all on one node

    @classmethod
    def of(cls, cpus: Sequence[tuple[int, ...]], nodes: Sequence[int]) -> "Placement":
        return cls(tuple(cpus), tuple(nodes) if len(set(nodes)) > 1 else ())


class Speed(msgspec.Struct, frozen=True):
    """The speed of the kernels, measured with all threads running at the same time."""

    instruction_sets: tuple[str, ...]  # of this CPU, if kernels exist for them; the best is last
    threads: int
    nodes: int  # NUMA nodes that these threads are bound to; 1: memory needs no placement
    read_bytes_per_s: float  # bytes of weights per second that a matmul with one token reads
    int8_ops_per_s: float
    bf16_ops_per_s: float | None  # None: no bfloat16 kernels for this CPU


def default_threads() -> int:
    """The default number of compute threads: one per physical core that this process may use, but
    at most the container's CPU quota.
    """
    quota = cpu_quota()
    cores = len(usable_cores())
    return max(1, cores if quota is None else min(cores, int(quota)))


def place_threads(affinity: str, threads: int) -> Placement:
    """Chooses the CPUs that each thread is bound to. `affinity` is "auto", "off" or a list such as
    "0-3,8".

    On one NUMA node, "auto" binds no thread: the system's scheduler does better, and engines of
    other processes would be bound to the same cores. So it also binds none under a CPU quota.
    On several nodes, it takes one CPU per physical core and spreads threads evenly over the nodes.
    Threads with neighbouring numbers are on the same node. If the threads would take all cores,
    each of them is bound to all CPUs of its node: the server needs CPU time too.
    """
    if affinity == "off":
        return Placement()
    cores, quota = usable_cores(), cpu_quota()
    node_of = {cpu: core.node for core in cores for cpu in core.cpus}
    if affinity != "auto":
        named = _named_cpus(affinity, threads)
        return Placement.of([(cpu,) for cpu in named], [node_of.get(cpu, 0) for cpu in named])
    if quota is not None and quota < len(cores):
        return Placement()
    if len({core.node for core in cores}) == 1:
        return Placement()
    if threads < len(cores):
        chosen = _spread(cores, threads)
        return Placement.of([core.cpus[:1] for core in chosen], [core.node for core in chosen])
    nodes = [cores[thread * len(cores) // threads].node for thread in range(threads)]
    members = {node: tuple(cpu for cpu in node_of if node_of[cpu] == node) for node in set(nodes)}
    return Placement.of([members[node] for node in nodes], nodes)


def _named_cpus(affinity: str, threads: int) -> list[int]:
    cpus = parse_cpus(affinity)
    absent = sorted(set(cpus) - usable_cpus())
    if absent:
        raise ConfigError(
            f"performance.affinity {affinity!r}: this process may not use CPU {absent[0]}"
        )
    if len(cpus) < threads:
        raise ConfigError(
            f"performance.affinity {affinity!r} names {len(cpus)} CPUs for {threads} threads; "
            "name more, or lower performance.threads"
        )
    return cpus[:threads]


def usable_cpus() -> set[int]:
    """The CPUs in this process's affinity mask; all CPUs if the system has no such masks."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores(sys_root: Path = _SYS, mask: set[int] | None = None) -> list[Core]:
    """The physical cores with a CPU in this process's affinity mask, sorted by NUMA node and CPU
    number.
    """
    usable = usable_cpus() if mask is None else mask
    nodes = _cpu_nodes(sys_root)
    cores = set()
    for cpu in usable:
        topology = sys_root / "devices/system/cpu" / f"cpu{cpu}" / "topology"
        siblings = _read(topology / "thread_siblings_list")
        together = set(parse_cpus(siblings)) & usable if siblings else {cpu}
        cores.add(Core(nodes.get(cpu, 0), tuple(sorted(together))))
    return sorted(cores, key=lambda core: (core.node, core.cpus))


def cpu_quota(sys_root: Path = _SYS, cgroup_file: Path = _CGROUP_OF_SELF) -> float | None:
    """The CPU quota of this process's cgroups, in CPUs. 2.5 allows 2.5 seconds of CPU time per
    second. None: no limit.
    """
    mount = sys_root / "fs/cgroup"
    quotas = []
    for line in (_read(cgroup_file) or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            quotas += [_quota_v2(folder) for folder in _with_parents(mount, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(folder) for folder in _with_parents(mount / "cpu", path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def parse_cpus(text: str) -> list[int]:
    """The CPU numbers in a list such as "0-3,8", in the same order."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return list(dict.fromkeys(cpus))


def measure(native: Any, threads: int) -> Speed:
    """Measures the kernels of the CPU's best instruction set. Takes well below a second."""
    rng = np.random.default_rng(0)
    # Test weights. The kernels also read some of these bytes as float16 scales. Any two of them are
    # a small positive number.
    quants = rng.integers(1, 0x30, _PERIOD, np.uint8)
    floats = rng.standard_normal(_PERIOD // 2, np.float32).view(np.uint16)[1::2].copy()
    operations = 2 * _TOKENS * _SIDE * _SIDE
    isa = native.instruction_sets()[-1]
    with ThreadPoolExecutor(threads) as pool:

        def together(time_one: Callable[[int], float]) -> float:
            """Runs `time_one` on all threads at once. Returns how often per second all threads
            together can do this work.
            """
            return max(
                sum(1 / each for each in pool.map(time_one, range(threads))) for _ in range(2)
            )

        int8 = together(lambda _: _matmul_time(native, _INT8, "Q8_0", quants)) * operations
        bf16 = None
        if native.has_bf16(isa):
            halves = floats.view(np.uint8)
            bf16 = together(lambda _: _matmul_time(native, _BF16, "BF16", halves)) * operations
        size = max(_READ_BYTES // threads, _READ_BYTES_PER_THREAD)
        room = list(pool.map(lambda _: _aligned(size, quants), range(threads)))
        panel = native.panel_bytes(native.layout_of("Q8_0"), _SIDE)
        piece = _PIECE_BYTES // panel * panel
        read = together(lambda thread: _read_time(native, room[thread], piece // panel)) * piece
    nodes = len(set(place_threads("auto", threads).nodes)) or 1
    return Speed(tuple(native.instruction_sets()), threads, nodes, read, int8, bf16)


def _matmul_time(native: Any, numerics: int, stored: str, period: NDArray[np.uint8]) -> float:
    """Seconds of a matmul with a small matrix on this thread. This is the fastest of six runs."""
    layout, isa = native.layout_of(stored), native.instruction_sets()[-1]
    weights = _aligned(_SIDE // 16 * native.panel_bytes(layout, _SIDE), period)
    return native.bench_matmul(isa, numerics, layout, weights, _SIDE, _SIDE, _TOKENS, 6)


def _read_time(native: Any, weights: NDArray[np.uint8], panels: int) -> float:
    """Seconds that this thread takes to read `panels` panels of weights that are not in the CPU's
    cache.

    `weights` is read in many small pieces, and the result is the median over all pieces. Other work
    on the core interrupts only a few pieces, so it hardly changes the median.
    """
    layout, isa = native.layout_of("Q8_0"), native.instruction_sets()[-1]
    piece = panels * native.panel_bytes(layout, _SIDE)
    return median(
        native.bench_matmul(
            isa, _INT8, layout, weights[start : start + piece], panels * 16, _SIDE, 1, 1
        )
        for start in range(0, len(weights) - piece + 1, piece)
    )


def _aligned(size: int, period: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`size` bytes that repeat `period`, aligned to 64 bytes as the kernels require."""
    room = np.empty(-(-size // _PERIOD) * _PERIOD + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : len(room) - 64 + start].reshape(-1, _PERIOD)[:] = period
    return room[start : start + size]


def _spread(cores: list[Core], threads: int) -> list[Core]:
    """Chooses a core for each thread. Each NUMA node gets the same number of threads, if it has
    enough cores. If the number of threads is not divisible, the first nodes get one more.
    """
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    shares = dict.fromkeys(nodes, 0)
    while sum(shares.values()) < threads:
        emptiest = min(
            (node for node in nodes if shares[node] < len(nodes[node])), key=shares.__getitem__
        )
        shares[emptiest] += 1
    return [core for node, members in nodes.items() for core in members[: shares[node]]]


def _cpu_nodes(sys_root: Path) -> dict[int, int]:
    nodes = {}
    for folder in (sys_root / "devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpus(_read(folder / "cpulist") or ""):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    return nodes


def _with_parents(mount: Path, path: str) -> list[Path]:
    """The folders of a cgroup and of its parents, as far as they exist. Inside a container, `path`
    may be the host's path, which does not exist under the container's own mount.
    """
    folder = mount / path.lstrip("/")
    inside = [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    return [each for each in inside if each.is_dir()]


def _quota_v2(folder: Path) -> float | None:
    fields = (_read(folder / "cpu.max") or "max").split()
    return None if fields[0] == "max" else int(fields[0]) / int(fields[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


if __name__ == "__main__":
    from engine.native.compiled import kernels

    try:
        print(json.dumps(msgspec.structs.asdict(measure(kernels(), default_threads()))))
    except ConfigError as error:
        sys.exit(str(error))
