"""R26: the package never turns data into code and never measures time by the wall clock. A server
listens on one address only. Dependencies have version bounds, and none is older than its last known
vulnerability.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import Requirement
from packaging.version import Version

from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.http.target import served_default_model
from tests.security.files.test_code_from_data import FILES, banned_calls, parsed, shells
from tests.security.processes.test_sockets import sockets_of
from tests.unit.project.test_structure import code_from_data, wall_clock_uses

PROJECT = Path(__file__).parents[4] / "pyproject.toml"
# For each package, the first version without its known vulnerabilities.
FLOORS = {
    "aiohttp": "3.12.14",
    "h11": "0.16.0",
    "jinja2": "3.1.6",
    "python-multipart": "0.0.22",
    "requests": "2.32.4",
    "sentencepiece": "0.2.1",
    "starlette": "0.49.1",
    "torch": "2.10",
    "transformers": "5.3",
    "urllib3": "2.6.0",
    "uvicorn": "0.50",
    "vllm": "0.23.1",
}


@figure(
    "R26",
    "code from data, wall clocks, listening sockets, dependencies",
    minutes=1,
    limits={
        "code_from_data": at_most(0),
        "wall_clock_durations": at_most(0),
        "tcp_listeners": at_most(1),
        "answering_listeners": at_least(1),
        "other_reachable_sockets": at_most(0),
        "dependencies_below_floor": at_most(0),
        "dependencies_without_bounds": at_most(0),
    },
    in_quick=False,  # tests/unit/project/test_structure.py and tests/security are the quick version
)
def supply_and_sockets(run: Run) -> Values:
    trees = parsed()
    coding = [*code_from_data(), *banned_calls(trees), *shells(trees)]
    clocks = wall_clock_uses()
    with served_default_model() as target:
        listeners, others = sockets_of(target.process.pid)
        port = httpx.URL(target.url).port
        answering = [each for each in listeners if each == ("127.0.0.1", port)]
    wanted = requirements()
    old, unbounded = below_floor(wanted), [str(each) for each in wanted if not is_bounded(each)]
    for problem in (*coding, *clocks, *others, *old, *unbounded):
        run.fail(problem)
    run.cases = len(FILES) + len(wanted) + len(FLOORS)
    run.notes |= {
        "files": len(FILES),
        "dependencies": len(wanted),
        "advisories": "checked by floors: there is no database of advisories offline",
    }
    return {
        "code_from_data": len(coding),
        "wall_clock_durations": len(clocks),
        "tcp_listeners": len(listeners),
        "answering_listeners": len(answering),
        "other_reachable_sockets": len(others),
        "dependencies_below_floor": len(old),
        "dependencies_without_bounds": len(unbounded),
    }


def requirements() -> list[Requirement]:
    """All requirements of an installation with any extras, except this package itself."""
    project: dict[str, Any] = tomllib.loads(PROJECT.read_text())
    stated = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        stated += extra
    return [each for each in map(Requirement, stated) if each.name != project["project"]["name"]]


def is_bounded(requirement: Requirement) -> bool:
    signs = {each.operator for each in requirement.specifier}
    return "==" in signs or bool(signs & {">=", ">"} and signs & {"<", "<=", "~="})


def below_floor(wanted: list[Requirement]) -> list[str]:
    """Requirements that are installed, or may be installed, in a version with known
    vulnerabilities.
    """
    found = []
    for name, floor in FLOORS.items():
        try:
            if Version(version(name)) < Version(floor):
                found.append(f"{name} {version(name)} is installed; {floor} is the first safe one")
        except PackageNotFoundError:
            continue
    for each in wanted:
        lowest = [Version(bound.version) for bound in each.specifier if bound.operator == ">="]
        if each.name in FLOORS and (not lowest or max(lowest) < Version(FLOORS[each.name])):
            found.append(f"{each} lets in what is older than {FLOORS[each.name]}")
    return found
