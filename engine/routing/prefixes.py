"""What each replica has probably cached: an approximate radix tree over blocks of prompts.

A prompt is cut into blocks of `BLOCK_CHARS`; a block's key is a hash of its content and of the key
before it, so that a set of keys is a tree: holding a key means having seen everything before it.
Each namespace (a tenant's salt) has a root of its own. Keys are forgotten oldest first when the
replica can't hold more, and when they have not been seen for `MAX_AGE_S`; a path's end is always
older than its beginning. Nothing of a prompt is kept but hashes.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from engine.core.interfaces.backend import ChatRequest, CompletionRequest, EmbedRequest

Request = ChatRequest | CompletionRequest | EmbedRequest

BLOCK_CHARS = 64
BLOCK_IDS = 16  # about as much text
CHARS_PER_TOKEN = 4
# Where two prompts are alike for so long, who else they resemble matters no more.
MAX_BLOCKS = 1024
DEFAULT_CAPACITY = 16_384  # blocks; for a replica that doesn't tell the size of its cache
MAX_CAPACITY = 131_072
MAX_AGE_S = 1800.0


class RoutedPrompt:
    """The keys of a prompt's blocks, first to last."""

    def __init__(self, request: Request) -> None:
        self.keys = tuple(_keys(request))

    @property
    def num_blocks(self) -> int:
        return len(self.keys)


class SeenPrefixes:
    """What one replica has seen."""

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._seen: OrderedDict[int, float] = OrderedDict()  # key -> when, oldest first

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def fullness(self) -> float:
        """0 to 1; a full one forgets as much as it learns."""
        return len(self._seen) / self._capacity

    def match(self, prompt: RoutedPrompt) -> int:
        """How many of the prompt's first blocks have been seen. Changes nothing."""
        too_old = self._clock() - MAX_AGE_S
        for number, key in enumerate(prompt.keys):
            if self._seen.get(key, too_old) <= too_old:
                return number
        return prompt.num_blocks

    def add(self, prompt: RoutedPrompt) -> None:
        now = self._clock()
        for key in reversed(prompt.keys):  # a path's beginning is the last to be forgotten
            self._seen[key] = now
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def resize(self, num_tokens: int) -> None:
        """The replica tells that its cache holds so many tokens."""
        blocks = num_tokens * CHARS_PER_TOKEN // BLOCK_CHARS
        self._capacity = max(1, min(blocks, MAX_CAPACITY))

    def forget_old(self) -> None:
        too_old = self._clock() - MAX_AGE_S
        while self._seen and next(iter(self._seen.values())) <= too_old:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """The replica has begun anew."""
        self._seen.clear()


def _keys(request: Request) -> Iterator[int]:
    # Python's hash of text is keyed with a secret of this process: no client can make two agree.
    key = hash(request.salt if isinstance(request, EmbedRequest) else request.context.salt)
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        ids = request.prompt
        for start in range(0, min(len(ids), MAX_BLOCKS * BLOCK_IDS), BLOCK_IDS):
            if start + BLOCK_IDS <= len(ids):
                key = hash((key, ids[start : start + BLOCK_IDS]))
                yield key
        return
    text = _text(request)
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        key = hash((key, text[start : start + BLOCK_CHARS]))
        yield key


def _text(request: Request) -> str:
    """The beginning of what the model will read, near enough: equal beginnings of two requests
    are equal here, and a conversation's next turn begins with all of the turn before.
    """
    most = MAX_BLOCKS * BLOCK_CHARS
    if isinstance(request, CompletionRequest):
        assert isinstance(request.prompt, str)
        return request.prompt[:most]
    if isinstance(request, EmbedRequest):
        return ""  # vectors take nothing from the cache
    parts, length = [], 0
    if request.tools:
        parts.append(msgspec.json.encode(request.tools).decode())
    for message in request.messages:
        content = message["content"] or ""
        part = f"\x1e{message['role']}\x1f{content[:most]}"
        if calls := message.get("tool_calls"):
            part += msgspec.json.encode(calls).decode()
        parts.append(part)
        length += len(part)
        if length >= most:
            break
    return "".join(parts)[:most]
