"""A toy engine whose prefix cache has tiers. Blocks move within the call, without threads."""

from engine.runtime.tiers.kv_tiers import attach_tiers
from engine.runtime.tiers.offload_worker import OffloadWorker
from engine.runtime.tiers.record import identity_of
from tests.support.toy_engine.engine import ToyEngine


class InlineMover(OffloadWorker):
    def read(self, job) -> None:
        super().read(job)
        while not job.is_done:
            self.read_some(job)

    def write(self, job) -> None:
        super().write(job)
        self.write_one(self._writes.popleft())


def add_tiers(
    engine: ToyEngine,
    tiers,
    identity: str = "toy",
    prompt_s=lambda count: None,
    make_mover=InlineMover,
) -> OffloadWorker:
    attached = attach_tiers(
        engine.kv,
        engine.runner,
        engine.spec,
        tiers,
        identity_of((identity,)),
        prompt_s,
        make_mover=make_mover,
    )
    return attached.mover


def tiered_engine(
    *tiers, identity: str = "toy", prompt_s=lambda count: None, make_mover=InlineMover, **options
):
    """A toy engine with these tiers, and its mover."""
    engine = ToyEngine(**options)
    return engine, add_tiers(engine, tiers, identity, prompt_s, make_mover)
