"""R08: random histories of the runtime with the toy model; every invariant holds after every
rule.
"""

import logging

from tests.property.run_machine import run_round
from tests.property.test_runtime_machine import RuntimeMachine
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure

NUM_STEPS = 100_000
ENOUGH_FAILURES = 3


def histories(seed: int) -> None:
    """Repeat the histories of this seed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # injected faults are logged like real ones
    try:
        run_round(seed)
    finally:
        logging.disable(before)


@figure(
    "R08",
    "rules of the runtime's state machine, invariants checked after each",
    minutes=8,
    limits={"rule_steps": at_least(NUM_STEPS), "violations": at_most(0)},
    case=histories,
    in_quick=False,
)
def state_machine(run: Run) -> Values:
    RuntimeMachine.num_rules = 0
    seeds = run.random("histories")
    while RuntimeMachine.num_rules < NUM_STEPS and len(run.failures) < ENOUGH_FAILURES:
        seed = seeds.getrandbits(48)
        try:
            histories(seed)
        except Exception as error:
            run.fail(f"{type(error).__name__}: {error}", seed)
    run.cases = RuntimeMachine.num_rules
    return {"rule_steps": run.cases, "violations": len(run.failures)}
