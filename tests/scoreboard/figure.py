"""A figure: a measurement with limits that it must keep.

A module of `figures/` registers one by decorating the function that measures it:

    @figure("R99", "cups balanced on a hand", minutes=1, limits={"dropped": at_most(0)})
    def cups(run: Run) -> Values:
        run.repeat(run.share(500), balance_a_cup)  # each case has a seed of its own
        return {"dropped": len(run.failures)}

If a case can be reproduced from its seed alone, `case=` names the function that does so. Failing
seeds are then stored in `failing_seeds.jsonl`, and `make test-integration` retries each of them.
"""

import importlib
import pkgutil
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, float]
MAX_FAILURES_TOLD = 5


@dataclass(frozen=True, slots=True)
class Limit:
    sign: str  # "<=" or ">="
    bound: float

    def holds(self, value: float) -> bool:
        """Whether the value keeps the limit. NaN never does."""
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


def at_most(bound: float) -> Limit:
    return Limit("<=", bound)


def at_least(bound: float) -> Limit:
    return Limit(">=", bound)


@dataclass(slots=True)
class Run:
    """One measurement: its randomness, the number of cases, and its failures."""

    seed: int
    quick: bool = False
    cases: int = 0  # number of cases tried; a figure without cases has failed
    failures: list[str] = field(default_factory=list)
    failing_seeds: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # facts besides the limits

    def share(self, whole: int, quick: int | None = None) -> int:
        """The number of cases: `whole`, or a fiftieth of it in a quick run."""
        if not self.quick:
            return whole
        return max(1, whole // 50) if quick is None else quick

    def random(self, *path: object) -> random.Random:
        """A generator that depends only on the seed and the path."""
        return random.Random(f"{self.seed}/{path}")

    def repeat(self, count: int, case: Callable[[int], None]) -> None:
        """Run cases with different seeds. A case that raises counts as a failure; the others still
        run.
        """
        seeds = self.random("cases")
        for _ in range(count):
            case_seed = seeds.getrandbits(48)
            self.cases += 1
            try:
                case(case_seed)
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}", case_seed)

    def fail(self, what: str, case_seed: int | None = None) -> None:
        self.failures.append(what)
        if case_seed is not None:
            self.failing_seeds.append(case_seed)


@dataclass(frozen=True, slots=True)
class Figure:
    id: str
    name: str
    minutes: float  # duration of a whole run on two cores
    limits: Mapping[str, Limit]
    measure: Callable[[Run], Values]
    case: Callable[[int], None] | None
    in_quick: bool

    def take(self, seed: int, *, quick: bool = False) -> dict[str, Any]:
        """Measure. Returns the result that is printed as one line of JSON."""
        run = Run(seed, quick)
        began = time.monotonic()
        try:
            values = self.measure(run)
        except Exception as error:
            values = {}
            run.fail(f"could not be measured: {type(error).__name__}: {error}")
        kept = {
            name: name in values and self.limits[name].holds(values[name]) for name in self.limits
        }
        return {
            "id": self.id,
            "name": self.name,
            "value": {name: round(value, 4) for name, value in values.items()},
            "limit": {name: str(limit) for name, limit in self.limits.items()},
            "pass": all(kept.values()) and run.cases > 0,
            "broken": [name for name, holds in kept.items() if not holds],
            "cases": run.cases,
            "seconds": round(time.monotonic() - began, 1),
            "seed": seed,
            "quick": quick,
            "notes": run.notes,
            "failures": [each[:300] for each in run.failures[:MAX_FAILURES_TOLD]],
            "failing_seeds": run.failing_seeds[:MAX_FAILURES_TOLD],
        }


_FIGURES: dict[str, Figure] = {}


def figure(
    id: str,
    name: str,
    *,
    minutes: float,
    limits: Mapping[str, Limit],
    case: Callable[[int], None] | None = None,
    in_quick: bool = True,
) -> Callable[[Callable[[Run], Values]], Callable[[Run], Values]]:
    """Register a figure. `in_quick`: whether `make test-integration` runs it, with fewer cases."""

    def register(measure: Callable[[Run], Values]) -> Callable[[Run], Values]:
        assert id not in _FIGURES, f"{id} is there twice"
        _FIGURES[id] = Figure(id, name, minutes, dict(limits), measure, case, in_quick)
        return measure

    return register


def all_figures() -> dict[str, Figure]:
    """All figures by id, in order."""
    from tests.scoreboard import figures

    for module in pkgutil.walk_packages(figures.__path__, f"{figures.__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_FIGURES.items()))
