"""Runs the state machine for a number of steps and prints one line of JSON.

python -m tests.property.run_machine --steps 100000 --seed 1
"""

import argparse
import json
import logging
import time
import traceback

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.test_runtime_machine import RuntimeMachine

RULES_PER_HISTORY = 60
HISTORIES_AT_ONCE = 25


def run(steps: int, first_seed: int) -> dict:
    """Run random histories until `steps` rules were executed or one fails. Each round has its own
    seed, so that a failing round can be repeated alone.
    """
    began = time.monotonic()
    RuntimeMachine.num_rules = 0
    failure, round_seed = None, first_seed
    while RuntimeMachine.num_rules < steps:
        try:
            run_round(round_seed)
        except Exception:
            failure = traceback.format_exc(limit=-4)
            break
        round_seed += 1
    return {
        "steps": RuntimeMachine.num_rules,
        "violations": int(failure is not None),
        "seconds": round(time.monotonic() - began, 1),
        "seed": round_seed if failure is not None else first_seed,
        "failure": failure,
    }


def run_round(round_seed: int) -> None:
    """Run one round without shrinking, which is slow: the seed is enough to reproduce a failure."""
    seed(round_seed)(RuntimeMachine)
    run_state_machine_as_test(
        RuntimeMachine,
        settings=settings(
            max_examples=HISTORIES_AT_ONCE,
            stateful_step_count=RULES_PER_HISTORY,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # injected faults are logged like real ones
    result = run(arguments.steps, arguments.seed)
    print(json.dumps(result))
    raise SystemExit(bool(result["violations"]))


if __name__ == "__main__":
    main()
