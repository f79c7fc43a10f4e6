"""Who holds which part of a model: a rank's stage of the pipeline, and its part of each layer.

Ranks are numbered stage by stage, as in vLLM: rank = stage * tensor + part.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The sizes of a group of ranks: `pipeline` stages, each of which has `tensor` ranks."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def sampling_rank(self) -> int:
        """The first rank of the last stage, which has the logits."""
        return self.num_ranks - self.tensor

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def part(self, rank: int) -> int:
        return rank % self.tensor

    def ranks_of(self, stage: int) -> range:
        """The ranks that share the layers of a stage."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)


def share(count: int, parts: int, index: int, unit: int = 1) -> range:
    """The part `index` of `count` items, which are divided as evenly as whole units of `unit` items
    allow. Earlier parts are the larger ones.
    """
    units = -(-count // unit)
    small, larger = divmod(units, parts)
    start = index * small + min(index, larger)
    stop = start + small + (index < larger)
    return range(min(start * unit, count), min(stop * unit, count))


def kv_heads_of(num_kv_heads: int, parts: int, index: int) -> range:
    """The KV heads of a part. If there are fewer KV heads than parts, several parts hold a copy of
    the same head.
    """
    if num_kv_heads >= parts:
        return share(num_kv_heads, parts, index)
    head = index * num_kv_heads // parts
    return range(head, head + 1)
