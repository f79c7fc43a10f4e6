"""R02: damaged safetensors, tokenizers and configurations are either read or refused with a typed
error, quickly and with little memory.
"""

from tests.scoreboard.figure import Run, Values, figure
from tests.scoreboard.mutations import pool as mutations_pool


def again(seed: int) -> None:
    mutations_pool.again("folder", seed)


@figure(
    "R02",
    "mutated safetensors, tokenizer and configuration files",
    minutes=4,
    limits=mutations_pool.LIMITS,
    case=again,
)
def mutated_folders(run: Run) -> Values:
    return mutations_pool.measure(run, "folder", run.share(10_000, quick=60))
