"""For `pytest -n`: a process imports a test file when it is about to run it.

A process of pytest-xdist collects every test before the first one runs: each imports all files
and all frameworks. With this plugin, a file is one item to it, which is collected when it runs.
"""

import gc
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest


class UnreadFile(pytest.File):
    def collect(self) -> Iterable[pytest.Item]:
        named = {"name": self.name, "nodeid": self.nodeid, "path": self.path}
        return [WholeFile.from_parent(self.session, folder=self.parent, **named)]


class WholeFile(pytest.Item):
    """All tests of a file. A process that dies within names the file as what failed.

    It is below the session itself: when it is next, all that is not the session's is torn down.
    """

    def __init__(self, folder: pytest.Collector, **named: Any) -> None:
        super().__init__(**named)
        self.folder = folder

    def runtest(self) -> None:
        raise AssertionError("a process runs its tests, each for itself")

    def tests(self) -> list[pytest.Item]:
        gc.disable()
        module = pytest.Module.from_parent(self.folder, path=self.path)
        tests = list(self.session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(
            session=self.session, config=self.config, items=tests
        )
        settle_garbage()
        return tests


def settle_garbage() -> None:
    """What was imported by now stays to the end: garbage is looked for among what comes after."""
    gc.collect()
    gc.freeze()
    gc.enable()


class Process:
    """The plugin in a process that runs tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.File:
        return UnreadFile.from_parent(parent, path=module_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not isinstance(item, WholeFile):
            return None
        queue = item.session.items
        place = queue.index(item)
        tests = item.tests()
        for test, following in zip_longest(tests, tests[1:], fillvalue=nextitem):
            queue[place] = test  # xdist compares it with what it reports
            item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        queue[place] = item
        return True


class Controller:
    """The plugin in the process that tells the others what to run."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.broken.add(crashitem)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """`--last-failed` runs tests by name, so it gets those of the files that did not run to
        their ends.
        """
        if self.broken:
            session.perform_collect(sorted(self.broken))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Process())
    elif config.option.numprocesses:
        config.pluginmanager.register(Controller())
