"""What happened to a request and when: the data from which a slow request is explained.

All times are `time.monotonic()` of the machine, which the frontend and the engine process share.
"""

import msgspec

# What a sequence can wait for before its first step. `Timeline.waits` has the seconds of each.
WAITS = (
    "step",  # the end of the step that is running
    "slots",  # a free slot: as many sequences run as fit in a batch
    "budget",  # the token budget of the steps, which running sequences used up
    "blocks",  # KV blocks: too few are free or evictable
    "turn",  # the turn of its tenant: later requests of other tenants went first
    "priority",  # requests with a higher priority, which came later and went first
    "prefix",  # a running sequence that computes the same prefix
    "tier",  # KV blocks that are loaded from a tier of the cache
)
# Upper edges of the batch sizes in `DecodeWork.by_rows`. The last bucket has no upper edge.
BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_CHUNKS = 32
MAX_PAUSES = 8


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A step that computed a part of the prompt."""

    began_at: float
    ended_at: float
    start: int  # the first prompt token of the chunk
    count: int
    num_rows: int  # sequences in the step
    num_tokens: int  # tokens in the step, of all sequences


class Pause(msgspec.Struct, frozen=True, array_like=True):
    """A preemption: from when to when the sequence did not run."""

    at: float
    until: float | None  # None: the sequence ended before it ran again
    num_lost: int  # tokens whose keys and values were freed


class DecodeWork(msgspec.Struct, frozen=True, array_like=True):
    """The steps between the first token of a sequence and its end."""

    num_steps: int = 0
    num_rows: int = 0  # sum of the batch sizes of these steps
    seconds: float = 0.0  # duration of these steps
    # Those steps that also computed a part of other requests' prompts
    num_mixed: int = 0
    mixed_s: float = 0.0
    mask_s: float = 0.0  # part of `seconds` in which the steps waited for grammar masks
    by_rows: tuple[int, ...] = ()  # number of steps by batch size; see BATCH_EDGES


class Divergence(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt differs from the nearest cached one of its tenant."""

    at: int  # index of the first token that differs
    token_ids: tuple[int, ...]  # the first few tokens of the prompt from there on
    cached_ids: tuple[int, ...]  # the tokens that the cache has in their place


class Timeline(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the engine did for one choice of a request. It is sent with the choice's last delta."""

    choice: int
    submitted_at: float  # when the engine got the request
    queued_at: float  # when its grammar was compiled and its images were encoded
    started_at: float | None  # when it was first scheduled
    first_token_at: float | None
    ended_at: float
    finish_reason: str
    waits: tuple[float, ...]  # seconds by the reasons in WAITS, before it was first scheduled
    has_grammar: bool = False
    num_images: int = 0
    num_before: int = 0  # sequences that waited when it was queued
    num_overtaken: int = 0  # sequences that were queued later and scheduled earlier
    num_prompt: int = 0
    num_cached: int = 0
    # Tokens that were loaded for it, by the tier of the prefix cache that had them.
    loaded_from: dict[str, int] = {}
    num_evicted: int = 0  # prompt tokens that were computed earlier and are no longer cached
    is_cache_off: bool = False  # whether the sequence could not use the prefix cache
    divergence: Divergence | None = None
    num_generated: int = 0
    num_resumed: int = 0  # tokens that an engine had generated which died
    chunks: tuple[Chunk, ...] = ()
    pauses: tuple[Pause, ...] = ()
    num_pauses: int = 0
    decode: DecodeWork = DecodeWork()


class Preparation(msgspec.Struct, frozen=True):
    """The work of our own backend before a request is in the engine."""

    began_at: float
    encoded_at: float  # when the chat template was rendered and the text was tokenized
    checked_at: float  # when its grammar was checked
    submitted_at: float
    num_prompt: int
