"""What the system refuses is told as the limit that was reached, in one line."""

import errno
import resource
import subprocess
import sys

import pytest

from engine.core.errors import ResourceError
from engine.core.sandbox import exhaustion
from engine.core.sandbox.exhaustion import limit_too_small, what_ran_out
from engine.worker import main as worker
from tests.scoreboard.figures.faults import r27_broken_starts as starts

THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("kind", "limit", "error", "word"),
    [
        (resource.RLIMIT_AS, 300 << 20, MemoryError("std::bad_alloc"), "300 MiB (ulimit -v)"),
        (resource.RLIMIT_AS, 300 << 20, OSError(errno.ENOMEM, ""), "300 MiB (ulimit -v)"),
        (resource.RLIMIT_AS, 300 << 20, THREAD, "300 MiB (ulimit -v)"),
        (resource.RLIMIT_NPROC, 30, THREAD, "30 (ulimit -u)"),
        (resource.RLIMIT_NPROC, 30, BlockingIOError(errno.EAGAIN, ""), "30 (ulimit -u)"),
        (resource.RLIMIT_NOFILE, 9, OSError(errno.EMFILE, ""), "9 (ulimit -n)"),
        (resource.RLIMIT_FSIZE, 512, OSError(errno.EFBIG, ""), "512 bytes (ulimit -f)"),
        (None, 0, MemoryError(), "no more room: address space"),
    ],
    ids=str,
)
def test_the_exhausted_resource_limit_is_named(monkeypatch, kind, limit, error, word):
    none = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        exhaustion.resource, "getrlimit", lambda each: (limit, limit) if each == kind else none
    )
    assert word in what_ran_out(error)
    fatal = worker._fatal(error)
    assert fatal.code == ResourceError.code and word in fatal.message


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, ""), RuntimeError("else"), ValueError("x")], ids=str
)
def test_other_errors_are_not_reported_as_resource_limits(error):
    assert what_ran_out(error) is None and worker._fatal(error).code == "internal_error"


def test_resource_limits_of_this_machine_suffice():
    assert limit_too_small() is None


@pytest.mark.seconds
@pytest.mark.parametrize("limit", starts.LIMITS)
def test_a_start_under_a_small_memory_limit_is_refused_in_one_line(limit: str):
    start = starts.Start(starts.LIMITS[limit], arguments=(starts.DEFAULT_MODEL,), limit=limit)
    ending = starts._once(start)
    assert ending.problems(start, limit_s=60.0) == [] and ending.leftovers == []


@pytest.mark.seconds
def test_an_engine_that_exceeds_ulimit_v_reports_it_without_a_traceback(default_model):
    command = [sys.executable, "-m", "engine.cli.main", "serve", str(default_model)]
    command += ["--port", "0", "--memory-pool-size-mb", "4096"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 1100000; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "ulimit -v" in done.stderr.splitlines()[-1]
