"""Defines rules and their results. A rule that returns has passed. It raises an exception if it
fails or must be skipped.

Each rule names a client that depends on it, and says what the user of that client would see. A rule
that no known client needs is advice: it is reported, but never fails a run.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from engine_tools.conformance.target import Target

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
class RuleResult:
    """The result of one rule. `detail` says what the server did, or why the rule was skipped."""

    rule: Rule
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class Group:
    """The rules of one topic. If the topic is optional, `missing` returns why a server lacks it, or
    None if the server has it.
    """

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
