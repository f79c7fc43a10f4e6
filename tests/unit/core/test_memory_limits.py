"""What the memory limits of a process's cgroups leave, read from trees of files."""

import resource
from pathlib import Path

import pytest

from engine.core.errors import ResourceError
from engine.core.memory import (
    MAX_MARGIN,
    MIB,
    MIN_MARGIN,
    MemoryLimit,
    MemoryRoom,
    memory_room,
    num_oom_kills,
    separate_oom_kills,
)
from engine.core.sandbox.processes import prefer_oom_kill
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.worker import memory as planning
from engine.worker.memory import MemoryNeeds, cpu_device, plan_memory

GIB = 1024 * MIB
UNLIMITED_V1 = 9223372036854771712
V2_MOUNT = "30 24 0:26 {shown} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "37 33 0:34 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def machine(
    root: Path, cgroup: str, mounts: str, files: dict[str, str], free: int = 20 * GIB
) -> Path:
    """A tree with /proc and /sys of a machine with 24 GiB."""
    texts = {
        "proc/meminfo": f"MemTotal: {24 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
        "proc/self/status": "VmSize:\t 4096 kB\nVmData:\t 2048 kB\n",
        "proc/vmstat": "nr_free_pages 7\noom_kill 3\n",
    }
    for name, text in {**texts, **{f"sys/fs/cgroup/{key}": v for key, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, current: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {value}\n" for name, value in stat.items())
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{current}\n",
        f"{folder}memory.stat": lines,
    }


def v1(folder: str, limit: int, usage: int, above: int = UNLIMITED_V1, **stat: int):
    lines = "".join(f"total_{name} {value}\n" for name, value in stat.items())
    return {
        f"memory/{folder}memory.limit_in_bytes": f"{limit}\n",
        f"memory/{folder}memory.usage_in_bytes": f"{usage}\n",
        f"memory/{folder}memory.stat": f"hierarchical_memory_limit {above}\n{lines}",
    }


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "total", "free"),
    [
        pytest.param("", "", {}, 24 * GIB, 20 * GIB, id="no cgroups"),
        pytest.param(
            "0::/\n", V2_MOUNT.format(shown="/"), {}, 24 * GIB, 20 * GIB, id="the root of v2"
        ),
        pytest.param(
            "0::/a/b\n",
            V2_MOUNT.format(shown="/"),
            v2("a/b/", "max", 100 * MIB) | v2("a/", str(800 * MIB), 300 * MIB),
            800 * MIB,
            500 * MIB,
            id="v2, the limit of an ancestor",
        ),
        pytest.param(
            "0::/a/b\n",
            V2_MOUNT.format(shown="/"),
            v2("a/b/", str(GIB), 200 * MIB) | v2("a/", str(2 * GIB), 2 * GIB - 50 * MIB),
            GIB,
            50 * MIB,
            id="v2, an ancestor that others fill",
        ),
        pytest.param(
            "0::/\n",
            V2_MOUNT.format(shown="/"),
            v2("", str(GIB), 900 * MIB, active_file=300 * MIB, inactive_file=100 * MIB),
            GIB,
            GIB - 500 * MIB,
            id="v2 in a cgroup namespace, with pages of files",
        ),
        pytest.param(
            "0::/a\n",
            V2_MOUNT.format(shown="/"),
            v2("a/", "max", 100 * MIB) | {"a/memory.high": f"{600 * MIB}\n"},
            600 * MIB,
            500 * MIB,
            id="v2, memory.high",
        ),
        pytest.param(
            "4:memory:/a\n0::/\n",
            V1_MOUNT.format(shown="/") + V2_MOUNT.format(shown="/").replace("cgroup ", "cgroup/u "),
            v1("a/", 800 * MIB, 300 * MIB, active_file=60 * MIB, inactive_file=40 * MIB)
            | v1("", UNLIMITED_V1, 2 * GIB),
            800 * MIB,
            600 * MIB,
            id="v1 beside v2",
        ),
        pytest.param(
            "4:cpu,memory:/docker/1f\n",
            V1_MOUNT.format(shown="/docker/1f").replace("rw,memory", "rw,cpu,memory"),
            v1("", UNLIMITED_V1, 100 * MIB, above=700 * MIB),
            700 * MIB,
            600 * MIB,
            id="v1 in a container, the limit of a pod that it can't see",
        ),
        pytest.param(
            "0::/../../system.slice\n",
            V2_MOUNT.format(shown="/"),
            v2("", str(500 * MIB), 100 * MIB),
            500 * MIB,
            400 * MIB,
            id="v2, from outside the namespace",
        ),
    ],
)
def test_the_tightest_memory_limit_of_all_cgroup_ancestors_counts(
    tmp_path, cgroup, mounts, files, total, free
):
    room = memory_room(machine(tmp_path, cgroup, mounts, files))
    assert (room.total, room.free) == (total, free)
    assert room.is_limited is (total < 24 * GIB)
    assert bool(room.bound) is room.is_limited


def test_free_memory_of_the_machine_counts_before_a_larger_cgroup_limit(tmp_path):
    files = v2("a/", str(8 * GIB), GIB)
    root = machine(tmp_path, "0::/a\n", V2_MOUNT.format(shown="/"), files, free=2 * GIB)
    room = memory_room(root)
    assert (room.total, room.free, room.bound) == (8 * GIB, 2 * GIB, "")
    assert room.plannable < room.free


@pytest.mark.parametrize(
    ("limit", "margin"), [(200 * MIB, MIN_MARGIN), (10 * GIB, GIB // 2), (999 * GIB, MAX_MARGIN)]
)
def test_a_memory_plan_leaves_a_margin_below_a_cgroup_limit(limit, margin):
    assert MemoryRoom(limit, limit, is_limited=True).plannable == limit - margin
    assert MemoryRoom(limit, limit).plannable == limit
    assert MemoryRoom(limit, 1, is_limited=True).plannable == 0


@pytest.mark.parametrize(
    ("kind", "name", "used"),
    [
        (resource.RLIMIT_AS, "ulimit -v", 4 * MIB),
        (resource.RLIMIT_DATA, "ulimit -d", 2 * MIB),
    ],
)
def test_rlimits_of_the_process_count(tmp_path, monkeypatch, kind, name, used):
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(
        resource, "getrlimit", lambda each: (GIB if each == kind else infinity, infinity)
    )
    room = memory_room(machine(tmp_path, "", "", {}))
    assert room.free == GIB - used
    assert name in room.bound


@pytest.mark.parametrize(
    ("cgroup", "mount", "files", "kills"),
    [
        ("0::/a\n", V2_MOUNT, {"a/memory.events": "oom 9\noom_kill 2\n"}, 2),
        ("4:memory:/a\n", V1_MOUNT, {"memory/a/memory.oom_control": "under_oom 0\noom_kill 4"}, 4),
        ("0::/\n", V2_MOUNT, {}, 3),  # those of the machine
    ],
)
def test_oom_kills_are_counted_by_the_cgroup_or_the_machine(tmp_path, cgroup, mount, files, kills):
    assert num_oom_kills(machine(tmp_path, cgroup, mount.format(shown="/"), files)) == kills


LIMITED = MemoryRoom(
    800 * MIB, 600 * MIB, is_limited=True, tightest=MemoryLimit(800 * MIB, 200 * MIB, "the cgroup")
)


@pytest.mark.parametrize("framework", ["native", "torch", "jax", "tinygrad"])
def test_every_framework_plans_inside_the_limit(monkeypatch, framework):
    monkeypatch.setattr(planning, "memory_room", lambda: LIMITED)
    device = framework_entry(framework).find_device("cpu", "auto")
    assert device.free_bytes == LIMITED.plannable
    needs = MemoryNeeds(weight_bytes=100 * MIB, token_bytes=4096)
    plan = plan_memory(8192, EngineOptions(model_path="", framework=framework), device, needs)
    planned = plan.weight_bytes + plan.pool_bytes + needs.workspace_bytes + plan.spare_bytes
    assert planned <= LIMITED.free - MIN_MARGIN


def test_a_model_beyond_the_limit_is_refused_with_limit_need_and_remedy(monkeypatch):
    monkeypatch.setattr(planning, "memory_room", lambda: LIMITED)
    device = cpu_device("cpu", "float32")
    needs = MemoryNeeds(weight_bytes=2 * GIB, token_bytes=4096)
    with pytest.raises(ResourceError) as refused:
        plan_memory(8192, EngineOptions(model_path="", framework="native"), device, needs)
    message = refused.value.message
    assert "the cgroup allows 800 MiB, of which 200 MiB are used" in message
    assert "needs 2,30" in message
    assert "raise it by 1,7" in message


@pytest.mark.parametrize("asked", [None, 256 * MIB])
def test_each_engine_after_an_oom_kill_plans_a_smaller_pool(asked):
    needs = MemoryNeeds(weight_bytes=0, token_bytes=16 * 1024)  # a context of 1024 takes 16 MiB
    device = planning.DeviceInfo("cpu", "float32", 768 * MIB)
    plans = []
    for kills in range(10):
        options = EngineOptions(
            model_path="", framework="native", pool_bytes=asked, num_oom_kills=kills, max_slots=64
        )
        plans.append(plan_memory(1024, options, device, needs))
    sizes = [plan.pool_bytes for plan in plans]
    assert sizes[0] == 256 * MIB
    assert sizes[1] == 128 * MIB
    least = 9 * 16 * needs.token_bytes  # of a short context
    assert all(
        later < earlier or later == least for earlier, later in zip(sizes, sizes[1:], strict=False)
    )
    assert sizes[-1] == least
    assert any("lack of memory (9 times)" in note for note in plans[-1].notes)


def test_after_the_first_oom_kill_a_whole_context_still_fits():
    needs = MemoryNeeds(weight_bytes=0, token_bytes=16 * 1024)  # a context of 1024 takes 16 MiB
    device = planning.DeviceInfo("cpu", "float32", 768 * MIB)

    def after(kills: int, pool: int) -> planning.MemoryPlan:
        options = EngineOptions(
            model_path="", framework="native", pool_bytes=pool, num_oom_kills=kills
        )
        return plan_memory(1024, options, device, needs)

    assert after(1, 24 * MIB).max_seq_len == 1024
    assert after(1, 24 * MIB).pool_bytes < 17 * MIB
    assert after(2, 24 * MIB).max_seq_len < 1024
    assert after(1, 16 * MIB).pool_bytes == 12 * MIB


def test_only_one_module_reads_the_machines_memory():
    """A plan that asks the machine does not know the limits of its cgroup."""
    package = Path(planning.__file__).parents[1]
    asking = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(
            word in path.read_text(encoding="utf-8")
            for word in ("virtual_memory", "SC_PHYS_PAGES", "MemAvailable", "memory.max")
        )
    ]
    assert asking == ["core/memory.py"]


@pytest.mark.parametrize(
    ("cgroup", "files", "is_single", "written"),
    [
        ("0::/a/b\n", {"a/b/memory.oom.group": "0\n"}, True, "0\n"),
        ("0::/a/b\n", {"a/b/memory.oom.group": "1\n"}, True, "0"),
        ("0::/a/b\n", {"a/b/memory.oom.group": "0\n", "a/memory.oom.group": "1\n"}, False, "0\n"),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, True, None),
    ],
)
def test_only_our_own_cgroup_is_set_to_kill_single_processes(
    tmp_path, cgroup, files, is_single, written
):
    root = machine(tmp_path, cgroup, V2_MOUNT.format(shown="/"), files)
    assert separate_oom_kills(root) is is_single
    own = root / "sys/fs/cgroup/a/b/memory.oom.group"
    assert (own.read_text() if own.exists() else None) == written


def test_a_container_with_a_read_only_cgroup_is_killed_as_a_whole(tmp_path, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    files = {"a/memory.oom.group": "1\n"}
    root = machine(tmp_path, "0::/a\n", V2_MOUNT.format(shown="/"), files)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert not separate_oom_kills(root)


@pytest.mark.parametrize(("score", "raised"), [("0\n", "500"), ("985\n", "1000")])
def test_a_child_raises_its_oom_score_above_its_parents(monkeypatch, score, raised):
    written = []
    monkeypatch.setattr(Path, "read_text", lambda path: score)
    monkeypatch.setattr(Path, "write_text", lambda path, text: written.append((str(path), text)))
    prefer_oom_kill()
    assert written == [("/proc/self/oom_score_adj", raised)]
