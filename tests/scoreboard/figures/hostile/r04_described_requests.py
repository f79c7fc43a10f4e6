"""R04: valid and invalid requests generated from the server's OpenAPI description get the
documented answers, and never a server error.
"""

from collections import Counter

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.http.described import Described, check_spread
from tests.scoreboard.http.target import held_server, served_default_model

QUICK_ROUTES = 6
REAL_SHARE = 0.1  # share of the cases that go to a real model; the others go to a fake backend


@figure(
    "R04",
    "requests from our own OpenAPI description, valid and invalid, all routes",
    minutes=6,
    limits={
        "server_errors": at_most(0),
        "schema_violations": at_most(0),
        "errors_over_8_kb": at_most(0),
    },
)
def described_requests(run: Run) -> Values:
    count = run.share(5_000, quick=40)
    num_real = 0 if run.quick else int(count * REAL_SHARE)
    with held_server() as target:
        both = [Described(run, target)]
        num_routes = QUICK_ROUTES if run.quick else None
        both[0].send(count - num_real, administer=True, num_routes=num_routes)
        assert target.is_healthy(), "the server did not survive it"
    if num_real:
        with served_default_model("--max-sequence-length", "128") as target:
            before = target.children()
            both.append(Described(run, target))
            both[1].send(num_real, administer=False)
            assert target.is_healthy() and before <= target.children(), "the engine died"
    statuses: Counter[int] = sum((each.statuses for each in both), Counter())
    if not run.quick:
        check_spread(statuses)
    run.notes |= {str(status): statuses[status] for status in sorted(statuses)}
    run.notes["with_a_model"] = sum(both[-1].statuses.values()) if num_real else 0
    return {
        "server_errors": sum(each.server_errors for each in both),
        "schema_violations": sum(each.violations for each in both),
        "errors_over_8_kb": sum(each.large_errors for each in both),
    }
