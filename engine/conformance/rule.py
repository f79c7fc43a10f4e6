"""Defines rules and their results. A rule passes by returning; it raises to fail or to be skipped.

A rule names the client that depends on it, and what that client's user would see. A rule that no
known client needs is advice: it is reported, but never fails a run.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.conformance.target import Target

Check = Callable[[Target], Awaitable[None]]
Severity = Literal["must", "advice"]
Outcome = Literal["pass", "fail", "advice", "skipped"]


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    group: str
    title: str
    client: str
    sees: str
    severity: Severity
    check: Check


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rule. `detail` says what the server did, or why the rule was skipped."""

    rule: Rule
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class Group:
    """Rules of one topic. For an optional topic, `missing` returns why this server lacks it."""

    name: str
    missing: Callable[[Target], Awaitable[str | None]] | None = None
    rules: list[Rule] = field(default_factory=list)

    def rule(
        self, id: str, title: str, *, client: str, sees: str, severity: Severity = "must"
    ) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            self.rules.append(Rule(id, self.name, title, client, sees, severity, check))
            return check

        return add
