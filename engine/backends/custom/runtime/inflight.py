"""Prompt blocks that running sequences are computing and will soon publish.

A waiting sequence whose next block is among them is held back: when the block is in the cache it is
shared instead of computed a second time. Blocks are known by a chained hash, so that equal hashes
mean equal prefixes (a collision would only delay a sequence, never mix contents).
"""

from array import array
from collections.abc import Iterable

from engine.backends.custom.runtime.sequence import Sequence


class InflightPrefixes:
    """Chain hash of a prompt prefix, block by block -> the running sequence that computes that
    block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[int, Sequence] = {}
        self._chains: dict[Sequence, list[int]] = {}

    def add(self, seq: Sequence) -> None:
        """The sequence waits: remember its chain, so that it is hashed once in its life."""
        tokens = array("q", seq.tokens[: seq.num_prompt])
        data, width = tokens.tobytes(), self._block_size * tokens.itemsize
        parent, chain = hash(seq.namespace), []
        for start in range(0, len(data) - width + 1, width):
            parent = hash((parent, data[start : start + width]))
            chain.append(parent)
        self._chains[seq] = chain

    def remove(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self.disown(seq)
        self._chains.pop(seq, None)

    def own(self, seq: Sequence, first_block: int) -> None:
        """The sequence starts to compute its prompt from `first_block` on."""
        for key in self._chains[seq][first_block:]:
            self._owners.setdefault(key, seq)

    def disown(self, seq: Sequence) -> None:
        """The sequence computes no longer, or has published all of its prompt."""
        for key in self._chains.get(seq, ()):
            if self._owners.get(key) is seq:
                del self._owners[key]

    def hold(self, seq: Sequence, num_matched: int) -> bool:
        """Whether another sequence is about to publish block `num_matched`; the sequence is held
        for it.
        """
        chain = self._chains[seq]
        # The last prompt token is always computed, so a block that holds it is of no use.
        if (num_matched + 1) * self._block_size >= len(seq.tokens) or num_matched >= len(chain):
            return False
        owner = self._owners.get(chain[num_matched])
        until = (num_matched + 1) * self._block_size
        if owner is None or owner.num_confirmed >= until:
            return False
        seq.held_by, seq.held_until = owner, until
        return True

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert that nothing is remembered of sequences that are gone."""
        running = set(running)
        assert self._chains.keys() == running | set(waiting), "a chain of nobody, or none"
        assert running.issuperset(self._owners.values()), "a block is awaited from nobody"
