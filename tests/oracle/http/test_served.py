"""Random histories of a real server with the default model: its engine is killed and stopped, and
each request gives what it gives alone.

`python -m tests.oracle.http --kind served` runs more of them.
"""

from tests.oracle.http.__main__ import opened, run

NUM_HISTORIES = 6


def test_requests_of_a_real_server_give_what_they_give_alone() -> None:
    with opened("served") as checks:
        result = run(checks, range(1, 1 + NUM_HISTORIES))
    assert not result["failures"], f"python -m tests.oracle.http --kind served: {result}"
