"""The routing table: which engines have which prefixes cached.

Engines are numbered, and a set of engines is an int with a bit for each of them. So the common
holders of two prefixes are found by one `&`, whatever the number of engines. Most prefixes have a
single holder; their entry is the holder's number, and only the others have a set.
"""

from collections.abc import Iterable, Iterator, Sequence


class RoutingTable:
    """Maps hashes of prefixes (`core/prefix_hashes.py`) to the engines that have them cached."""

    def __init__(self) -> None:
        # hash -> number of the only holder, or -(set of holders) if there are several
        self._holders: dict[int, int] = {}
        self._of_engine: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def count(self, engine: int) -> int:
        """Number of prefixes that an engine has."""
        return len(self._of_engine.get(engine, ()))

    def has(self, engine: int, prefix: int) -> bool:
        return prefix in self._of_engine.get(engine, ())

    def missing(self, engine: int, prefixes: Iterable[int]) -> list[int]:
        """The prefixes of the list that an engine has not cached."""
        own = self._of_engine.get(engine, ())
        return [each for each in prefixes if each not in own]

    def add(self, engine: int, prefixes: Iterable[int]) -> None:
        own, holders = self._of_engine.setdefault(engine, set()), self._holders
        for prefix in prefixes:
            if prefix in own:
                continue
            own.add(prefix)
            known = holders.setdefault(prefix, engine)
            if known != engine:
                holders[prefix] = -(_as_set(known) | 1 << engine)

    def remove(self, engine: int, prefixes: Iterable[int]) -> None:
        own, holders = self._of_engine.get(engine, set()), self._holders
        for prefix in prefixes:
            if prefix not in own:
                continue
            own.discard(prefix)
            left = _as_set(holders[prefix]) & ~(1 << engine)
            if not left:
                del holders[prefix]
            elif left & (left - 1):
                holders[prefix] = -left
            else:
                holders[prefix] = left.bit_length() - 1

    def drop(self, engine: int) -> None:
        """Remove everything that an engine has."""
        self.remove(engine, list(self._of_engine.get(engine, ())))
        self._of_engine.pop(engine, None)

    def matches(
        self, prefixes: Sequence[int], usable: int, max_groups: int
    ) -> Iterator[tuple[int, int]]:
        """Groups of engines by how much of a prompt they have, most first: the number of matching
        prefixes, and the set of engines. `prefixes` are those of the prompt, shortest first. What
        is left after `max_groups` groups is taken as having nothing.

        An engine that has a prefix has all shorter ones. So each group is found by bisection.
        """
        length, left = len(prefixes), usable
        for _ in range(max_groups):
            low, high, found = 0, length, 0
            while low < high:
                middle = (low + high + 1) // 2
                if held := self._held(prefixes[middle - 1], left):
                    low, found = middle, held
                else:
                    high = middle - 1
            if not low:
                break
            yield low, found
            left &= ~found
            length = low - 1
        if left:
            yield 0, left

    def _held(self, prefix: int, among: int) -> int:
        known = self._holders.get(prefix)
        return 0 if known is None else _as_set(known) & among


def _as_set(holders: int) -> int:
    return -holders if holders < 0 else 1 << holders
