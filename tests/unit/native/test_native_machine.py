"""Threads and CPUs for kernels, on machines made of files: SMT, NUMA, affinity masks, quotas."""

from itertools import chain
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.native import compiled, machine
from engine.native.execution import build
from engine.native.machine import Core, Placement

MASK = {0, 1, 2, 3, 8, 9, 10, 11, 12}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Cores 0-3 on node 0 and 4-7 on node 1; CPU n + 8 is the other thread of core n."""
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, cores: list[Core], quota: float | None = None) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)


def test_hyperthreads_of_a_core_count_once(two_nodes):
    cores = machine.usable_cores(two_nodes, set(range(16)))
    assert cores == [Core(n // 4, (n, n + 8)) for n in range(8)]


def test_an_affinity_mask_hides_cores_and_threads(two_nodes):
    assert machine.usable_cores(two_nodes, {1, 9, 13, 6}) == [
        Core(0, (1, 9)),
        Core(1, (6,)),
        Core(1, (13,)),
    ]


def test_without_topology_every_cpu_is_a_core(tmp_path):
    assert machine.usable_cores(tmp_path, {0, 5}) == [Core(0, (0,)), Core(0, (5,))]


@pytest.mark.parametrize(
    ("quota", "threads"), [(None, 8), (64.0, 8), (8.0, 8), (3.9, 3), (1.5, 1), (0.2, 1)]
)
def test_default_threads_never_oversubscribe(two_nodes, monkeypatch, quota, threads):
    use(monkeypatch, machine.usable_cores(two_nodes, set(range(16))), quota)
    assert machine.default_threads() == threads


@pytest.mark.parametrize(
    ("threads", "cpus"),
    [
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (4, [0, 1, 4, 5]),
        (5, [0, 1, 2, 4, 5]),
        (1, [0]),
    ],
)
def test_threads_are_spread_over_numa_nodes_contiguously(two_nodes, monkeypatch, threads, cpus):
    use(monkeypatch, machine.usable_cores(two_nodes, set(range(16))))
    placement = machine.place_threads("auto", threads)
    assert placement.cpus == tuple((cpu,) for cpu in cpus)
    assert placement.nodes == (() if threads == 1 else tuple(cpu // 4 for cpu in cpus))


@pytest.mark.parametrize("threads", [8, 9])
def test_threads_on_all_cores_stay_on_their_numa_node(two_nodes, monkeypatch, threads):
    use(monkeypatch, machine.usable_cores(two_nodes, set(range(16))))
    placement = machine.place_threads("auto", threads)
    nodes = (0,) * (threads - 4) + (1,) * 4
    whole = ((0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15))
    assert placement == Placement(tuple(whole[node] for node in nodes), nodes)


@pytest.mark.parametrize("threads", [1, 3, 4, 5])
def test_threads_on_a_single_node_are_not_pinned(two_nodes, monkeypatch, threads):
    use(monkeypatch, machine.usable_cores(two_nodes, {0, 1, 2, 3}))
    assert machine.place_threads("auto", threads) == Placement()


def test_threads_beyond_a_small_numa_node_go_to_the_others(two_nodes, monkeypatch):
    use(monkeypatch, machine.usable_cores(two_nodes, {0, 4, 5, 6}))
    assert machine.place_threads("auto", 3) == Placement(((0,), (4,), (5,)), (0, 1, 1))


def test_cores_shared_with_other_processes_are_not_pinned(two_nodes, monkeypatch):
    cores = machine.usable_cores(two_nodes, set(range(16)))
    use(monkeypatch, cores, quota=4.0)
    assert machine.place_threads("auto", 4) == Placement()
    use(monkeypatch, cores, quota=8.0)
    assert machine.place_threads("auto", 4).nodes == (0, 0, 1, 1)


def test_threads_can_be_bound_to_named_cpus(two_nodes, monkeypatch):
    use(monkeypatch, machine.usable_cores(two_nodes, set(range(16))))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: MASK)
    assert machine.place_threads("off", 4) == Placement()
    assert machine.place_threads("9,0-2", 3) == Placement(((9,), (0,), (1,)))
    assert machine.place_threads("0,12", 2) == Placement(((0,), (12,)), (0, 1))
    with pytest.raises(ConfigError, match="may not use CPU 4"):
        machine.place_threads("2-4", 2)
    with pytest.raises(ConfigError, match="names 2 CPUs for 3 threads"):
        machine.place_threads("2,3,2", 3)


def quota_of(root: Path, cgroup: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        path = root / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "cgroup").write_text(cgroup)
    return machine.cpu_quota(root, root / "cgroup")


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cgroup.procs": ""}, None),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4.0),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "800000 100000"}, 4.0),
        ("0::/host/path\n", {"cpu.max": "200000 100000"}, 2.0),
        (
            "4:memory:/x\n1:cpu,cpuacct:/x\n0::/\n",
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_cgroup_cpu_quota_counts(tmp_path, cgroup, files, quota):
    assert quota_of(tmp_path, cgroup, files) == quota


def test_default_threads_fit_this_machines_affinity():
    assert 1 <= machine.default_threads() <= len(machine.os.sched_getaffinity(0))
    placement = machine.place_threads("auto", machine.default_threads())
    assert set(chain.from_iterable(placement.cpus)) <= machine.os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("no module"), r"for lack of a C\+\+ compiler.*engine\[torch\]"),
        (ImportError("libstdc++.so.6: no such file"), "can't be loaded: libstdc.*install .* again"),
    ],
)
def test_missing_native_kernels_are_reported_with_advice(monkeypatch, error, advice):
    def refuse(name):
        raise error

    monkeypatch.setattr(compiled, "import_module", refuse)
    with pytest.raises(ConfigError, match=advice):
        build.find_device("auto", "auto")
