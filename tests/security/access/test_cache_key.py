"""A cached prefix is found by exactly what it was computed from, and by nobody else (SEC-30; T1).

The tree compares tokens themselves. Only the tokens of images are replaced, by numbers derived from
a hash of the image. Each adapter has namespaces of its own, by a hash of its content. One engine
has one model, in one type: those are no part of the key, as nothing of another is there.
"""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.interfaces.handover import Handover, Prefilled
from engine.core.interfaces.request import GenerateRequest, ImageInput, SamplingParams
from engine.runtime.block_pool import BlockPool
from engine.runtime.model_runner import FROM_DEVICE
from engine.runtime.radix_cache import RadixCache
from engine.runtime.requests.images import image_digest, key_of
from engine.runtime.sequence import packed
from engine.servers.access.auth import Principal
from tests.support.toy_engine.engine import ToyEngine

SIZE = 4
# What keys and values are computed from; every other field must not change them.
# Of `interp`, the edits: `tests/parity/interp/test_interp_batch.py` runs them.
KEYED = {"prompt", "salt", "images", "adapter", "interp"}
NOT_KEYED: dict[str, Any] = {
    "request_id": "another",
    "params": SamplingParams(max_tokens=3, temperature=1.0, seed=9),
    "eos_ids": (5,),
    "priority": 3,
    "tenant": "another",
    "timeout_s": 60.0,
    "queue_timeout_s": 60.0,
    "grammar": None,
    "bad_words": ((5, 6),),
    "dry_breakers": ((5,),),
    "expected": (5, 6),
    "reports_progress": True,
    "tells_begin": True,
    "resumed": None,  # its tokens follow the prompt, and the tree compares them too
    "pools": True,
    "handover": Handover(Prefilled("p", "lost", 0.1)),  # where blocks may be found by their keys
    "keeps_blocks": True,
    "second_start": 1,  # only encoders read it, and they have no cache
}


def test_every_request_field_is_classified_as_cache_keyed_or_not() -> None:
    """A new one (an adapter, an image) must be thought about before this is green."""
    assert set(GenerateRequest.__struct_fields__) == KEYED | set(NOT_KEYED)


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=SIZE, max_size=8 * SIZE),
    namespace=st.text(max_size=8),
    other=st.text(max_size=8),
    where=st.integers(0, 8 * SIZE - 1),
    change=st.integers(1, 2**31 - 1),
)
def test_a_changed_token_or_namespace_misses_the_prefix_cache_from_there_on(
    tokens: list[int], namespace: str, other: str, where: int, change: int
) -> None:
    tokens = tokens[: len(tokens) // SIZE * SIZE]
    pool = BlockPool(64)
    cache = RadixCache(pool, SIZE)
    blocks = pool.take(len(tokens) // SIZE)
    cache.insert(namespace, packed(tokens), blocks, only_own=False)
    assert cache.match(namespace, packed(tokens)).blocks == blocks
    if other != namespace:
        assert cache.match(other, packed(tokens)).blocks == []
    where %= len(tokens)
    changed = tokens[:]
    changed[where] = (changed[where] + change) % 2**31
    assert cache.match(namespace, packed(changed)).blocks == blocks[: where // SIZE]


def hits(**changes: Any) -> int:
    """Tokens of a second request's prompt that were found, where it differs in `changes`."""
    engine = ToyEngine(num_blocks=64)
    engine.submit("first", range(1, 18), max_tokens=2)
    engine.run()
    request = engine.channel.inbox
    engine.submit("second", range(1, 18), max_tokens=2)
    request[-1] = msgspec.structs.replace(request[-1], request_id="second", **changes)
    before = engine.kv.num_hit
    for _ in range(50):
        engine.turn()
    return engine.kv.num_hit - before


@pytest.mark.parametrize("name", sorted(NOT_KEYED.keys() - {"request_id"}))
def test_fields_that_do_not_affect_kv_values_do_not_change_the_cache_key(name: str) -> None:
    assert hits(**{name: NOT_KEYED[name]}) == hits() > 0


@settings(max_examples=40, deadline=None)
@given(
    pixels=st.binary(min_size=24, max_size=24),
    where=st.integers(0, 23),
    change=st.integers(1, 255),
)
def test_any_change_of_an_image_changes_its_cache_key(
    pixels: bytes, where: int, change: int
) -> None:
    """Each part of its content and of its shape. No key could be taken for a token."""
    changed = bytearray(pixels)
    changed[where] = (changed[where] + change) % 256
    images = [
        ImageInput(3, 5, 2, 4, pixels),
        ImageInput(3, 5, 4, 2, pixels),
        ImageInput(3, 6, 2, 4, pixels),
        ImageInput(3, 5, 2, 4, bytes(changed)),
    ]
    keys = [key_of(image_digest(each), each.count)[:5] for each in images]
    assert all((key < FROM_DEVICE).all() for key in keys)
    for position, key in enumerate(keys):
        assert not any(set(key) & set(other) for other in keys[position + 1 :])
    moved = ImageInput(9, 5, 2, 4, pixels)  # the place is no part of its content
    assert image_digest(moved) == image_digest(images[0])


def test_salt_and_prompt_change_the_cache_key() -> None:
    assert hits(salt="another") == 0
    assert hits(prompt=(2, *range(2, 18))) == 0


@given(
    one=st.tuples(st.text(max_size=6), st.text(max_size=6)),
    other=st.tuples(st.text(max_size=6), st.text(max_size=6)),
)
def test_a_client_salt_cannot_select_another_tenants_namespace(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """A salt is made of the tenant's name, which is a digest, and of what the client chose."""
    tenants = [hashlib.sha256(each.encode()).hexdigest()[:32] for each, _ in (one, other)]
    salts = [
        Principal(tenant).digest(chosen)
        for tenant, (_, chosen) in zip(tenants, (one, other), strict=True)
    ]
    assert (salts[0] == salts[1]) == (one == other)
    assert not set(salts) & set(tenants)
