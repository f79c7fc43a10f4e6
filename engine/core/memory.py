"""States how much memory this process may use: what the machine has free, and what the limits of
its cgroups (v1 and v2) and of the process itself leave.

All limits of a cgroup and of its ancestors hold at once, so the tightest counts. Pages of files are
not counted as used, because the kernel drops them when memory is needed.
"""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MIB = 2**20
# A plan inside a limit leaves this much of it for what no plan knows: the frontend's own growth,
# its writers, and short-lived children. A share of the limit, but at least and at most so many
# bytes.
MARGIN_SHARE = 0.05
MIN_MARGIN, MAX_MARGIN = 48 * MIB, 1024 * MIB
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit, what counts towards it, and its name for messages."""

    limit: int  # bytes
    used: int
    name: str

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory of this process."""

    total: int  # of the machine, or the smallest limit
    free: int
    is_limited: bool = False  # by anything but the machine's memory
    tightest: MemoryLimit | None = None  # the limit that leaves least; None: the machine does

    @property
    def plannable(self) -> int:
        """The bytes that a plan may take: all that is free on a machine without limits, and less
        inside a limit, at which processes are killed.
        """
        if not self.is_limited:
            return self.free
        margin = min(max(MIN_MARGIN, int(MARGIN_SHARE * self.total)), MAX_MARGIN)
        return max(0, self.free - margin)

    @property
    def bound(self) -> str:
        """What bounds the memory, for messages. Empty if nothing but the machine does."""
        if self.tightest is None:
            return ""
        used, limit = self.tightest.used / MIB, self.tightest.limit / MIB
        return f"{self.tightest.name} allows {limit:,.0f} MiB, of which {used:,.0f} MiB are used"


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    """The memory that this process may use now. `root` has the folders `proc` and `sys`."""
    total, free = _machine(root)
    limits = [*cgroup_limits(root), *_own_limits(root)]
    held = [each for each in limits if each.limit < total]
    if not held:
        return MemoryRoom(total, free)
    tightest = min(held, key=lambda each: each.free)
    return MemoryRoom(
        min(each.limit for each in held),
        min(free, tightest.free),
        is_limited=True,
        tightest=tightest if tightest.free <= free else None,
    )


def cgroup_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The memory limits of this process's cgroups and of all their ancestors that can be seen."""
    limits: list[MemoryLimit] = []
    for folder, is_v2 in memory_cgroups(root):
        limits += _limits_v2(folder) if is_v2 else _limits_v1(folder)
    return limits


def num_oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this process's cgroup were killed for lack of memory, or of the whole
    machine if no cgroup counts them. Differences of this number tell whether one was killed.
    """
    for folder, is_v2 in memory_cgroups(root):
        name = "memory.events" if is_v2 else "memory.oom_control"
        fields = _fields(folder / name)
        if "oom_kill" in fields:
            return fields["oom_kill"]
    return _fields(root / "proc/vmstat").get("oom_kill", 0)


def separate_oom_kills(root: Path = Path("/")) -> bool:
    """Ask the kernel to kill single processes of this process's cgroup when its memory runs out,
    and not all at once. Returns whether it will.

    Only the cgroup of this process is changed, if its files may be written. In most containers they
    may not. With cgroup v1, processes are always killed one by one.
    """
    groups = [folder / "memory.oom.group" for folder, is_v2 in memory_cgroups(root) if is_v2]
    for number, file in enumerate(groups):
        if _read(file).strip() != "1":
            continue
        if number:  # an ancestor belongs to others
            return False
        try:
            file.write_text("0", encoding="ascii")
        except OSError:
            return False
    return True


def memory_cgroups(root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroups that count memory, each followed by its ancestors, and
    whether they are of version 2.
    """
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0"
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for mounted_path, point, mounted_v2 in mounts:
            if mounted_v2 == is_v2:
                folder = root / point.lstrip("/")
                for each in _with_ancestors(folder, mounted_path, path):
                    yield each, is_v2
                break


def _with_ancestors(mount: Path, mounted_path: str, path: str) -> Iterator[Path]:
    """The folders of a cgroup and its ancestors, up to the mount point. Inside a container, the
    mount may show only a part of the tree (`mounted_path`), and the path may be one that only the
    host knows. Then the mount point itself is the nearest cgroup that can be seen.
    """
    inside = PurePosixPath(path)
    if inside.is_relative_to(mounted_path):
        inside = inside.relative_to(mounted_path)
    else:
        inside = PurePosixPath(path.lstrip("/"))
    folder = mount if ".." in inside.parts else mount / inside
    folders = [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    yield from (each for each in folders if each.is_dir())


def _mounts(root: Path) -> Iterator[tuple[str, str, bool]]:
    """Every mount of a cgroup hierarchy that may count memory: the path of the hierarchy that it
    shows, its mount point, and whether it is of version 2.
    """
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, found, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not found or len(fields) < 5 or len(kinds) < 3:
            continue
        is_v2 = kinds[0] == "cgroup2"
        if is_v2 or (kinds[0] == "cgroup" and "memory" in kinds[2].split(",")):
            yield _unescaped(fields[3]), _unescaped(fields[4]), is_v2


def _unescaped(text: str) -> str:
    """A path of mountinfo, in which blanks are written as octal numbers."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _limits_v2(folder: Path) -> Iterator[MemoryLimit]:
    used: int | None = None
    for name in ("memory.max", "memory.high"):
        text = _read(folder / name).strip()
        if not text.isdigit():
            continue  # "max", or there is none at the root
        if used is None:
            used = _used(folder / "memory.current", _fields(folder / "memory.stat"), "")
        yield MemoryLimit(int(text), used, f"the cgroup's {name}")


def _limits_v1(folder: Path) -> Iterator[MemoryLimit]:
    stat = _fields(folder / "memory.stat")
    text = _read(folder / "memory.limit_in_bytes").strip()
    # Ancestors may be out of sight in a container; the kernel says the smallest of their limits.
    limit = min(int(text) if text.isdigit() else _UNLIMITED, *_above(stat))
    if limit < _UNLIMITED:
        used = _used(folder / "memory.usage_in_bytes", stat, "total_")
        yield MemoryLimit(limit, used, "the cgroup's memory.limit_in_bytes")


def _above(stat: dict[str, int]) -> tuple[int, ...]:
    return (stat.get("hierarchical_memory_limit", _UNLIMITED), _UNLIMITED)


def _used(counter: Path, stat: dict[str, int], prefix: str) -> int:
    """What can't be freed by dropping pages of files."""
    text = _read(counter).strip()
    used = int(text) if text.isdigit() else 0
    dropped = sum(stat.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
    return max(0, used - dropped - stat.get("slab_reclaimable", 0))


def _own_limits(root: Path) -> Iterator[MemoryLimit]:
    """The limits of this process alone (`ulimit -v`, `ulimit -d`)."""
    sizes = _fields(root / "proc/self/status")
    for kind, name, field in (
        (resource.RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize"),
        (resource.RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(soft, 1024 * sizes.get(field, 0), name)


def _machine(root: Path) -> tuple[int, int]:
    """The bytes of the machine's memory, and those that are free."""
    fields = _fields(root / "proc/meminfo")
    if "MemTotal" in fields and "MemAvailable" in fields:
        return 1024 * fields["MemTotal"], 1024 * fields["MemAvailable"]
    import psutil  # for systems other than Linux

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines such as "name 12" or "name: 12 kB"."""
    fields = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ", 1).split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def _read(path: Path) -> str:
    """The content of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
