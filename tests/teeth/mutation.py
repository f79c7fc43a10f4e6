"""A mistake that the suite must notice.

It is a piece of a module's source and what stands there instead. `caught_by` is where it is
noticed: the state machine, the random schedules, or a test by its node id.
"""

from dataclasses import dataclass

MACHINE = "machine"
SCHEDULES = "schedules"


@dataclass(frozen=True)
class Mutation:
    name: str
    module: str
    right: str
    wrong: str
    caught_by: str = MACHINE
