"""Shows the results as a table for people, or as one JSON document for programs.

A server's output is untrusted text: it is shown without control characters and is never interpreted
as markup.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_tools.conformance.rule import RuleResult
from engine_tools.conformance.target import Target

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"pass": "green", "fail": "bold red", "advice": "yellow", "skipped": "dim"}
_LABELS = {"fail": "FAIL"}


def counts(results: Sequence[RuleResult]) -> dict[str, int]:
    found = Counter(result.outcome for result in results)
    return {outcome: found[outcome] for outcome in ("pass", "fail", "advice", "skipped")}


def summary(results: Sequence[RuleResult]) -> str:
    count = counts(results)
    return (
        f"{len(results)} rules: {count['pass']} passed, {count['fail']} failed,"
        f" {count['advice']} advice, {count['skipped']} skipped"
    )


def as_json(target: Target, results: Sequence[RuleResult]) -> dict[str, Any]:
    return {
        "url": str(target.client.base_url),
        "model": target.model,
        "summary": counts(results),
        "rules": [
            {
                "id": result.rule.id,
                "group": result.rule.group,
                "title": result.rule.title,
                "severity": result.rule.severity,
                "outcome": result.outcome,
                "detail": result.detail,
                "client": result.rule.client,
                "client_sees": result.rule.sees,
            }
            for result in results
        ],
    }


def as_table(results: Sequence[RuleResult]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("what it checks", ratio=4)
    table.add_column("result", no_wrap=True)
    table.add_column("what was seen, and what a client makes of it", ratio=6)
    for result in results:
        label = _LABELS.get(result.outcome, result.outcome)
        table.add_row(
            Text(result.rule.id),
            Text(result.rule.title),
            Text(label, style=_STYLES[result.outcome]),
            Text(_explanation(result)),
        )
    return table


def _explanation(result: RuleResult) -> str:
    detail = "".join(each if each.isprintable() else " " for each in result.detail)
    if result.outcome in ("pass", "skipped"):
        return detail
    return f"{detail}. {result.rule.client}: {result.rule.sees}"
