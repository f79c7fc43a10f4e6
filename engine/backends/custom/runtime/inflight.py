"""Prompt blocks that running sequences are computing and will soon publish.

A waiting sequence whose next block is among them is held back: when the block is in the cache it is
shared instead of computed a second time. Blocks are known by a chained hash, so that equal hashes
mean equal prefixes (a collision would only delay a sequence, never mix contents).
"""

from collections.abc import Iterable

from engine.backends.custom.runtime.sequence import Sequence, packed


class InflightPrefixes:
    """Chain hash of a prompt prefix, block by block -> the running sequence that computes that
    block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._width = block_size * packed().itemsize  # bytes of a block's ids
        self._owners: dict[int, Sequence] = {}
        self._owned: dict[Sequence, list[int]] = {}
        self._chains: dict[Sequence, list[int]] = {}
        # Of the last sequence that came: often the next one begins like it.
        self._latest: tuple[str, bytes, list[int]] = ("", b"", [])

    def add(self, seq: Sequence) -> None:
        """The sequence waits: remember its chain, so that it is hashed once in its life."""
        data, width = seq.tokens[: seq.num_prompt].tobytes(), self._width
        namespace, latest, known = self._latest
        common = _common_blocks(data, latest, width) if namespace == seq.namespace else 0
        chain = known[:common]
        parent = chain[-1] if chain else hash(seq.namespace)
        for start in range(common * width, len(data) - width + 1, width):
            parent = hash((parent, data[start : start + width]))
            chain.append(parent)
        self._chains[seq] = chain
        self._latest = seq.namespace, data, chain

    def remove(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self.disown(seq)
        self._chains.pop(seq, None)

    def own(self, seq: Sequence, first_block: int) -> None:
        """The sequence starts to compute its prompt from `first_block` on."""
        new = self._chains[seq][first_block:]
        self._owned[seq] = [key for key in new if self._owners.setdefault(key, seq) is seq]

    def disown(self, seq: Sequence) -> None:
        """The sequence computes no longer, or has published all of its prompt."""
        for key in self._owned.pop(seq, ()):
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
        assert running.issuperset(self._owned), "a block is awaited from nobody"
        owners = {key: seq for seq, keys in self._owned.items() for key in keys}
        assert owners == self._owners, "owners"


def _common_blocks(data: bytes, other: bytes, width: int) -> int:
    """Leading blocks of `width` bytes in which the two agree."""
    low, high = 0, min(len(data), len(other)) // width
    while low < high:
        middle = (low + high + 1) // 2
        if data[: middle * width] == other[: middle * width]:
            low = middle
        else:
            high = middle - 1
    return low
