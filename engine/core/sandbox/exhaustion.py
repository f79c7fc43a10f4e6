"""Names the limit that was reached when the system refuses memory, files, threads or processes.

Only what the system says is known where it happens: "Cannot allocate memory", or "can't start new
thread". What the user can change is the limit behind it.
"""

import errno
import resource

# Below these, no server can run. With too little address space, libraries that are not ours abort
# the process, or fail with whatever was to be done next.
MINIMA = {
    "v": (resource.RLIMIT_AS, 2**30, "{} of address space", "besides its model"),
    "n": (resource.RLIMIT_NOFILE, 64, "{} open files", "besides one for each connection"),
    "f": (resource.RLIMIT_FSIZE, 2**20, "files of {}", "and more to store anything"),
}

_KINDS = {
    errno.ENOMEM: ("address space", "v", resource.RLIMIT_AS),
    errno.EMFILE: ("open files", "n", resource.RLIMIT_NOFILE),
    errno.EAGAIN: ("processes and threads", "u", resource.RLIMIT_NPROC),
    errno.EFBIG: ("size of a file", "f", resource.RLIMIT_FSIZE),
}
_IN_BYTES = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)


def what_ran_out(error: BaseException) -> str | None:
    """If a resource limit caused the exception, a sentence that names the limit and what to do.
    None otherwise.
    """
    if isinstance(error, MemoryError):
        return _sentence(errno.ENOMEM)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        # A thread needs address space for its stack, and counts as a process.
        is_memory = _soft(resource.RLIMIT_AS) is not None
        return _sentence(errno.ENOMEM if is_memory else errno.EAGAIN)
    if isinstance(error, OSError) and error.errno in _KINDS:
        return _sentence(error.errno)
    return None


def limit_too_small() -> str | None:
    """Why no server can run under the limits of this process. None if one can."""
    for flag, (kind, least, what, besides) in MINIMA.items():
        allowed = _soft(kind)
        if allowed is not None and allowed < least:
            has, needs = what.format(_amount(kind, allowed)), _amount(kind, least)
            return (
                f"a process may have {has} here (ulimit -{flag}), and a server needs at least"
                f" {needs} {besides}; raise the limit"
            )
    return None


def _sentence(number: int) -> str:
    name, flag, kind = _KINDS[number]
    allowed = _soft(kind)
    if allowed is None:
        return f"The system has no more room: {name}."
    return f"The limit of the {name} is reached: it is {_amount(kind, allowed)} (ulimit -{flag})."


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _amount(kind: int, value: int) -> str:
    if kind not in _IN_BYTES:
        return str(value)
    return f"{value / 2**20:.0f} MiB" if value >= 2**20 else f"{value} bytes"
