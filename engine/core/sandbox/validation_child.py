"""The process with limits in which a model file is parsed first (see `validation`). `Fork` forks
it, or it is started as a module. The arguments of the module are the validator, the path, the CPU
seconds and the parent's process id.

Its memory, CPU time and open files are limited. It can't write files, start programs or use the
network. It outputs what the validator returns. If the model is invalid, it outputs one line about
the error and exits with status 1.
"""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.core.errors import EngineError, ModelFormatError
from engine.core.sandbox.checkpoint_validation import MAX_OUTPUT_BYTES, files_of
from engine.core.sandbox.processes import die_with_parent

# Memory that the process may use in addition to twice the size of the model's files. The
# interpreter, numpy and a large vocabulary need it.
HEADROOM_BYTES = 4 << 30
MAX_OPEN_FILES = 512
MAX_REPORT_CHARS = 1000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
# Prefixes of Python audit events that a parser never causes. The process refuses them.
_REFUSED_EVENTS = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"),
    *("ctypes.dlopen", "shutil.", "urllib.", "http."),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForbiddenEventError(OSError):
    """A validator tried an operation that is forbidden in this process, such as opening a
    socket.
    """


def main() -> int:
    die_with_parent(int(sys.argv[4]))
    return read_limited(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), lambda: None)


class Fork:
    """A validator that runs in a fork of this process. A fork starts faster than a new process,
    because the interpreter and the modules are already loaded. This process must have only one
    thread when it makes the fork.
    """

    def __init__(self, validator: str, path: Path, max_cpu_s: int) -> None:
        self._output, output = os.pipe()
        self._passed, passed = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            status = 2
            try:
                die_with_parent(parent)
                os.setsid()
                os.dup2(passed, 0)
                os.dup2(output, 1)
                _close_files()
                os.environ["RAYON_NUM_THREADS"] = "1"
                status = read_limited(validator, path, max_cpu_s, _say_passed)
                sys.stdout.flush()
            finally:
                os._exit(status)
        os.close(output)
        os.close(passed)

    def wait_until_passed(self) -> bool:
        """Wait until the validator has checked what the engine process reads. False if it failed
        before that.
        """
        with open(self._passed, "rb") as passed:
            return bool(passed.read(1))

    def finish(self) -> tuple[int, bytes]:
        """Wait for the end of the validation. Returns the exit status and the output."""
        with open(self._output, "rb") as output:
            report = output.read(MAX_OUTPUT_BYTES)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]), report


def _say_passed() -> None:
    with contextlib.suppress(BrokenPipeError):  # it was said before, and nobody reads any more
        os.write(0, b"1")


def _close_files() -> None:
    """Close all files except standard input, output and error. A parser must not be able to use the
    socket to the frontend.
    """
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2:
            # The descriptor of the listing itself is already closed.
            with contextlib.suppress(OSError):
                os.close(number)


def read_limited(validator: str, path: Path, max_cpu_s: int, passed: Callable[[], None]) -> int:
    """Limit this process for the rest of its life, then run the validator. Returns the exit
    status.
    """
    _leave_network()
    sys.dont_write_bytecode = True
    module, _, name = validator.partition(":")
    validate = getattr(import_module(module), name)
    _limit(path, max_cpu_s)
    try:
        output = validate(path, passed) or b""
        passed()
        # Larger output is dropped. In that case, the server parses the file again.
        if len(output) <= MAX_OUTPUT_BYTES:
            sys.stdout.buffer.write(output)
    except EngineError as error:
        return _report(error.error_code, str(error))
    except MemoryError:
        return _report(
            ModelFormatError.code, f"{path.name} takes more memory to read than its size justifies"
        )
    except Exception as error:
        return _report(ModelFormatError.code, f"{path.name} can't be read: {error!r}")
    return 0


def _report(code: str, message: str) -> int:
    print(code, "".join(each if each.isprintable() else " " for each in message[:MAX_REPORT_CHARS]))
    return 1


def _leave_network() -> None:
    """Enter a network namespace without interfaces. If the system forbids that, only the audit hook
    prevents network access. For root, no user namespace is created, because root could not read the
    files of other users in it.
    """
    if sys.platform == "linux":
        spaces = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWUSER | _CLONE_NEWNET
        ctypes.CDLL(None).unshare(spaces)


def _limit(path: Path, max_cpu_s: int) -> None:
    size = sum(file.stat().st_size for file in files_of(path) if file.is_file())
    for kind, limit in (
        (resource.RLIMIT_AS, 2 * size + HEADROOM_BYTES),
        (resource.RLIMIT_CPU, max_cpu_s),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED_EVENTS):
        raise ForbiddenEventError(event)
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        raise ForbiddenEventError("open for writing")


if __name__ == "__main__":
    sys.exit(main())
