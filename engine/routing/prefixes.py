"""Estimates which prefixes each replica has cached, with an approximate radix tree.

A prompt is split into blocks of `BLOCK_CHARS`. The key of a block is a hash of its content and of
the previous block's key. So a set of keys is a tree, in which a key stands for a whole prefix. Each
salt has its own root. If there are more keys than the replica's cache can hold, the oldest are
dropped, and so are keys not used for `MAX_AGE_S`. Within a prompt, later blocks are dropped before
earlier ones. Only hashes of prompts are stored.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from engine.core.interfaces.backend import ChatRequest, CompletionRequest, EmbedRequest

Request = ChatRequest | CompletionRequest | EmbedRequest

BLOCK_CHARS = 64
# Token ids per block, if a prompt is given as token ids. They are about as much text as
# BLOCK_CHARS.
BLOCK_IDS = 16
CHARS_PER_TOKEN = 4
# Only this many blocks at the start of a prompt are compared. Longer common prefixes would not
# change the choice of a replica.
MAX_BLOCKS = 1024
DEFAULT_CAPACITY = 16_384  # in blocks; used for a replica that does not report its cache size
MAX_CAPACITY = 131_072
MAX_AGE_S = 1800.0


class RoutedPrompt:
    """A request's prompt as a sequence of block keys. Each LoRA adapter has prefixes of its own."""

    def __init__(self, request: Request, adapter: str = "") -> None:
        self.keys = tuple(_keys(request, adapter))

    @property
    def num_blocks(self) -> int:
        return len(self.keys)


class SeenPrefixes:
    """Estimates which prefixes one replica has in its cache, from the prompts that it was sent."""

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        # block key -> time last seen, oldest first
        self._seen: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def fullness(self) -> float:
        """Used share of the capacity, from 0 to 1. At 1, each new key evicts an old one."""
        return len(self._seen) / self._capacity

    def match(self, prompt: RoutedPrompt) -> int:
        """Number of blocks at the start of the prompt that the replica has seen."""
        too_old = self._clock() - MAX_AGE_S
        for number, key in enumerate(prompt.keys):
            if self._seen.get(key, too_old) <= too_old:
                return number
        return prompt.num_blocks

    def add(self, prompt: RoutedPrompt) -> None:
        now = self._clock()
        for key in reversed(prompt.keys):  # the first block is added last, so it is evicted last
            self._seen[key] = now
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def resize(self, num_tokens: int) -> None:
        """Set the capacity from the replica's reported cache size in tokens."""
        blocks = num_tokens * CHARS_PER_TOKEN // BLOCK_CHARS
        self._capacity = max(1, min(blocks, MAX_CAPACITY))

    def forget_old(self) -> None:
        too_old = self._clock() - MAX_AGE_S
        while self._seen and next(iter(self._seen.values())) <= too_old:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Drop all keys, because the replica's cache is empty."""
        self._seen.clear()


def _keys(request: Request, adapter: str) -> Iterator[int]:
    # Python's str hash is keyed with a per-process secret, so clients can't produce collisions.
    salt = request.salt if isinstance(request, EmbedRequest) else request.context.salt
    key = hash((salt, adapter))
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
    """The approximate text of the prompt. If two prompts have a common prefix, so do these texts.
    The text of a conversation's next turn starts with the text of the previous turn.
    """
    most = MAX_BLOCKS * BLOCK_CHARS
    if isinstance(request, CompletionRequest):
        assert isinstance(request.prompt, str)
        return request.prompt[:most]
    if isinstance(request, EmbedRequest):
        return ""  # embeddings don't use the prefix cache
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
