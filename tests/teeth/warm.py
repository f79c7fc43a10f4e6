"""Runs tests against many mistakes in one warm process.

The tests are collected once. For each mistake the process forks, and the child exchanges the code
of the changed function, wherever it is held, and runs the tests up to the first that fails. So a
mistake costs what its tests cost, and no imports. A mistake in what runs at import is planted
before any import (`cold`). Processes that tests start find the mistake too.
"""

import ctypes
import gc
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.teeth.mutation import MACHINE
from tests.teeth.planted import ROOT, Planted, hand_on, install, path_of

CAUGHT, SURVIVED, HUNG, UNTESTED = "caught", "survived", "hung", "untested"
NOT_PLANTED = "not planted"
PR_SET_CHILD_SUBREAPER = 36
# A mistake may make its tests run for ever: limits of a child, beside a multiple of what they take.
MIN_CPU_S = 20.0
MIN_WALL_S = 120.0
SLOWER = 10.0
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Trial:
    """A mistake, and the tests that may notice it, the likeliest first."""

    name: str
    planted: Planted
    tests: Sequence[str]  # node ids, also of files and classes; or `MACHINE`
    seconds: float  # what they take without it


@dataclass(frozen=True)
class Verdict:
    outcome: str
    reason: str = ""  # the test that noticed it


Work = Callable[[Path, "Say"], None]
Say = Callable[[str], None]


def in_child(work: Work, seconds: float) -> tuple[str, bool]:
    """What `work` says in a forked process, and whether that ended in time. `seconds` are what it
    takes. Nothing is left of it: no process, no file.
    """
    folder = Path(tempfile.mkdtemp(prefix="teeth-"))
    output = folder / "said"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            _alone(folder, int(MIN_CPU_S + SLOWER * seconds))
            work(folder, lambda words: _say(output, words))
        except BaseException as error:
            _say(output, f"error {type(error).__name__}: {error}")
        finally:
            os._exit(0)
    ended = _ends(child, MIN_WALL_S + SLOWER * seconds)
    _kill(child)
    os.waitpid(child, 0)
    _kill_orphans()
    said = output.read_text() if output.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    return said, ended


def _say(output: Path, words: str) -> None:
    with open(output, "a") as file:
        file.write(words + "\n")


def _alone(folder: Path, cpu_s: int) -> None:
    """This process has files and limits of its own."""
    os.setsid()
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in ("TMPDIR", "PYTEST_DEBUG_TEMPROOT", "XDG_DATA_HOME"):
        os.environ[name] = str(folder)
    tempfile.tempdir = str(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def _ends(child: int, most_s: float) -> bool:
    process = os.pidfd_open(child)
    try:
        return bool(select.select([process], [], [], most_s)[0])
    finally:
        os.close(process)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # before it had a group


def adopt_orphans() -> None:
    """Processes whose parent has ended become children of this one, which then ends them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_orphans() -> None:
    for _ in range(100):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for each in map(int, children):
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)


class Watch:
    """A plugin: ends the process with the first test that fails."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(f"failed {report.nodeid}")
            os._exit(0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say(f"failed {report.nodeid}")
            os._exit(0)


def cold(trial: Trial) -> Verdict:
    """Plant the mistake before the engine is imported."""

    def work(folder: Path, say: Say) -> None:
        install(trial.planted.module, trial.planted.source)
        hand_on(trial.planted, folder)
        if trial.tests[0] == MACHINE:
            _run_machine(trial.tests[0], say)
        else:
            pytest.main([*OPTIONS, *trial.tests], plugins=[Watch(say)])
        say("passed")

    return _verdict(*in_child(work, trial.seconds))


def _run_machine(name: str, say: Say) -> None:
    from tests.teeth.run import is_noticed

    if is_noticed(name):
        say(f"failed {name}")
        os._exit(0)


def _verdict(said: str, ended: bool) -> Verdict:
    last = said.splitlines()[-1] if said else ""
    word, _, reason = last.partition(" ")
    if not last:
        return Verdict(CAUGHT, "the process died") if ended else Verdict(HUNG)
    return Verdict({"passed": SURVIVED, "failed": CAUGHT}.get(word, NOT_PLANTED), reason)


class Warm:
    """A plugin that, in place of running the tests, tries the mistakes and reports each verdict."""

    def __init__(self, trials: Iterator[Trial], report: Callable[[Trial, Verdict], None]) -> None:
        self._trials = trials
        self._report = report
        self._items: dict[str, pytest.Item] = {}
        self._sound: dict[str, bool] = {}  # whether a test passes here without a mistake
        self._held: Mapping[tuple[str, str, int], list[FunctionType]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        gc.unfreeze()
        self._held = held_functions()
        gc.freeze()
        for trial in self._trials:
            self._report(trial, self.verdict(trial))
        return True

    def verdict(self, trial: Trial) -> Verdict:
        names = [name for each in trial.tests for name in self._named(each)]
        tests = [name for name in names if self._sound.get(name, True)]
        if not tests:
            return Verdict(UNTESTED)
        verdict = self._run(trial.planted, tests, trial.seconds)
        if verdict.outcome == CAUGHT and verdict.reason in self._items:
            if verdict.reason not in self._sound:
                alone = self._run(None, [verdict.reason], trial.seconds)
                self._sound[verdict.reason] = alone.outcome == SURVIVED
            if not self._sound[verdict.reason]:
                return self.verdict(trial)
        return verdict

    def _named(self, test: str) -> list[str]:
        if test in self._items or test == MACHINE:
            return [test]
        return [name for name in self._items if name.startswith((f"{test}::", f"{test}["))]

    def _run(self, planted: Planted | None, tests: Sequence[str], seconds: float) -> Verdict:
        def work(folder: Path, say: Say) -> None:
            if planted is not None:
                self._exchange(planted)
                hand_on(planted, folder)
            if tests[0] == MACHINE:
                _run_machine(tests[0], say)
            else:
                self._run_items([self._items[name] for name in tests], say)
            say("passed")

        return _verdict(*in_child(work, seconds))

    def _run_items(self, items: Sequence[pytest.Item], say: Say) -> None:
        items[0].config.pluginmanager.register(Watch(say))
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)

    def _exchange(self, planted: Planted) -> None:
        install(planted.module, planted.source)
        if planted.module not in sys.modules:
            return
        path = str(path_of(planted.module))
        at = (planted.function, planted.line)
        for code in functions_of(compile(planted.source, path, "exec")):
            if (code.co_qualname, code.co_firstlineno) == at:
                held = self._held[path, code.co_qualname, code.co_firstlineno]
                break
        else:
            held = []
        assert held, f"no function {at} of {planted.module} is held"
        for function in held:
            function.__code__ = code


def held_functions() -> Mapping[tuple[str, str, int], list[FunctionType]]:
    """The engine's functions that exist now, by file, qualified name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    home = str(ROOT / "engine")
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(home):
            code = each.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(each)
    return found


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """The code of the functions and methods of a module."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            if "<locals>" not in each.co_qualname:
                yield from functions_of(each)
