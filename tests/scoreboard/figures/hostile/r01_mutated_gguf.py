"""R01: a damaged GGUF file is either read or refused with a typed error, quickly and with little
memory.
"""

from tests.scoreboard.figure import Run, Values, figure
from tests.scoreboard.mutations import pool as mutations_pool


def again(seed: int) -> None:
    mutations_pool.again("gguf", seed)


@figure("R01", "mutated GGUF files", minutes=3, limits=mutations_pool.LIMITS, case=again)
def mutated_gguf(run: Run) -> Values:
    return mutations_pool.measure(run, "gguf", run.share(10_000, quick=60))
