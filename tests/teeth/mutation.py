"""A mutation: a deliberate bug that the test suite must detect.

It names a piece of a module's source and its replacement. `caught_by` says what detects it: the
state machine, or a test given by its node id.
"""

from dataclasses import dataclass

MACHINE = "machine"


@dataclass(frozen=True)
class Mutation:
    name: str
    module: str
    right: str
    wrong: str
    caught_by: str = MACHINE
