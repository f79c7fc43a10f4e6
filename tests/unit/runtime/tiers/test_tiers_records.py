"""Records of cache tiers: no damaged, renamed or foreign record is taken for the one asked for."""

import functools
import hashlib
import os
import random
import shutil
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from engine.runtime.sequence import packed
from engine.runtime.tiers import disk
from engine.runtime.tiers.base import BoundedIndex, Loaded, Record, Wanted
from engine.runtime.tiers.disk import DiskTier
from engine.runtime.tiers.record import (
    LAYOUT_VERSION,
    PIECE_BYTES,
    BlockKey,
    RecordShape,
    chain,
    identity_of,
    root_key,
)
from engine.worker import tiers as worker_tiers

OURS = identity_of(("model", "bfloat16"))
SHAPES = {
    "full": RecordShape("full", "full", 16, 3000),
    "latent": RecordShape("full", "latent", 16, 3000),
    "window": RecordShape("window", "window", 16, 1200),
    "state": RecordShape("state", "state", 16, 700),
}


def places(count: int, salt: str = "", identity: bytes = OURS) -> list[BlockKey]:
    tokens, keys = packed(range(16 * count)), list[bytes]()
    root = root_key(identity, salt)
    chain(root, tokens, 16, keys)
    return [
        BlockKey(key, parent, tokens[16 * i : 16 * i + 16].tobytes())
        for i, (parent, key) in enumerate(pairwise([root, *keys]))
    ]


@functools.cache
def record(kind: str, place: BlockKey, identity: bytes = OURS, seed: int = 0) -> Record:
    shape = SHAPES[kind]
    payload = np.random.default_rng(seed).integers(0, 256, shape.num_bytes, np.uint8)
    return Record(shape, identity, place, payload)


def whole(each: Record) -> bytes:
    return each.header() + each.payload.tobytes()


def damage(rng: random.Random, kind: str, content: bytes) -> bytes:
    """One of the ways in which a record can be wrong."""
    way = rng.choice(
        ("flip", "flips", "cut", "longer", "zeros", "swap", "foreign", "kind", "other")
    )
    data, at = bytearray(content), rng.randrange(len(content))
    if way == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif way == "flips":
        for _ in range(rng.randint(2, 9)):
            data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    elif way == "cut":
        del data[at:]
    elif way == "longer":
        data += rng.randbytes(rng.randint(1, 50))
    elif way == "zeros":
        data[at:] = bytes(len(data) - at)
    elif way == "swap":
        data = data[at:] + data[:at]
    elif way == "foreign":  # of another model
        foreign = identity_of(("model", "float32"))
        data = bytearray(whole(record(kind, places(2)[1], foreign)))
    elif way == "kind":
        other = rng.choice([each for each in SHAPES if each != kind])
        data = bytearray(whole(record(other, places(2)[1])))
    elif way == "other":  # a record that was renamed: of another block, or of another tenant
        other_place = rng.choice((places(2)[0], places(3)[2], places(2, "another tenant")[1]))
        data = bytearray(whole(record(kind, other_place)))
    return bytes(data)


def test_ten_thousand_damaged_records_are_all_detected() -> None:
    rng, place = random.Random(7), places(2)[1]
    num_wrong = 0
    records = {kind: (record(kind, place), whole(record(kind, place))) for kind in SHAPES}
    while num_wrong < 10_000:
        kind = rng.choice(list(SHAPES))
        right, content = records[kind]
        wrong = damage(rng, kind, content)
        if wrong == content:
            continue
        num_wrong += 1
        start = right.shape.header_bytes
        wanted = Wanted(right.shape, OURS, [place])
        assert not wanted.is_valid(0, wrong[:start], memoryview(wrong)[start:]), num_wrong


@pytest.mark.parametrize("kind", SHAPES)
def test_a_disk_tier_returns_stored_blocks_and_deletes_changed_ones(tmp_path, kind) -> None:
    tier = DiskTier(tmp_path, 2**20, "lru", None)
    wanted = Wanted(SHAPES[kind], OURS, places(4))
    stored = [record(kind, place, seed=i) for i, place in enumerate(wanted.places)]
    assert tier.store(stored) == 4 and tier.store(stored) == 0
    assert tier.find([wanted.name(i) for i in range(4)]) == [True] * 4
    path = tier.path_of(wanted.name(2))
    path.write_bytes(path.read_bytes()[:-1])
    rows = np.empty((4, wanted.shape.num_bytes), np.uint8)
    assert tier.load(wanted, rows) == [Loaded.OK, Loaded.OK, Loaded.BAD, Loaded.OK]
    for index in (0, 1, 3):
        assert (rows[index] == stored[index].payload).all()
    assert tier.load(wanted, rows)[2] is Loaded.MISSING and not path.exists()
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*")} == {0o600}


def test_a_block_is_stored_and_read_in_pieces(tmp_path) -> None:
    shape = RecordShape("full", "full", 16, 2 * PIECE_BYTES + 5)
    payload = np.random.default_rng(1).integers(0, 256, shape.num_bytes, np.uint8)
    tier = DiskTier(tmp_path, 2**30, "lru", None)
    tier.store([Record(shape, OURS, places(1)[0], payload)])
    wanted, rows = Wanted(shape, OURS, places(1)), np.empty((1, shape.num_bytes), np.uint8)
    assert tier.load(wanted, rows) == [Loaded.OK] and (rows[0] == payload).all()
    path = tier.path_of(wanted.name(0))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the last piece
    path.write_bytes(content)
    assert tier.load(wanted, rows) == [Loaded.BAD]


def test_a_block_file_appears_only_when_it_is_complete(tmp_path, monkeypatch) -> None:
    """A reader must not see a part of a block, nor the rest of a write that failed."""
    tier, place = DiskTier(tmp_path, 2**20, "lru", None), places(1)[0]

    def fails(handle, header, payload) -> None:
        assert not list(tmp_path.glob("*/*.full"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_write_all", fails)
    with pytest.raises(OSError, match="No space"):
        tier.store([record("full", place)])
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("field", ["tokens", "model", "salt", "adapter", "before"])
def test_every_part_of_a_block_key_changes_it(field) -> None:
    def key(tokens=range(16), model="m", salt="s", adapter="", before=0) -> bytes:
        root = root_key(identity_of((model,)), salt, adapter)
        keys = list[bytes]()
        chain(root, packed([*([before] * 16), *tokens]), 16, keys)
        return keys[-1]

    other = {"tokens": range(1, 17), "model": "n", "salt": "t", "adapter": "a", "before": 1}
    assert key(**{field: other[field]}) != key()
    assert root_key(OURS, "ab", "c") != root_key(OURS, "a", "bc")


@pytest.mark.parametrize(("policy", "gone"), [("lru", "b"), ("lfu", "b"), ("fifo", "a")])
def test_the_index_evicts_by_its_policy(policy, gone) -> None:
    index = BoundedIndex(30, policy, None)
    for name in "abc":
        assert index.add(name, 10) == []
    index.use("aacc" + "b" * (policy == "lfu"))
    # A record that was never used goes first by LFU, even if it is new.
    assert index.add("d", 10, num_uses=2) == [gone]
    assert index.num_bytes == 30


def test_unused_tier_records_expire(tmp_path) -> None:
    now = time.time()
    tier = DiskTier(tmp_path, 2**20, "lru", 60.0, clock=lambda: now)
    tier.store([record("full", place) for place in places(2)])
    names = [Wanted(SHAPES["full"], OURS, places(2)).name(i) for i in range(2)]
    now += 50
    tier.use(names[:1])
    tier.tidy_up()
    now += 20
    tier.tidy_up()
    assert tier.find(names) == [True, False] and tier.num_records == 1


def test_a_restarted_tier_knows_sizes_and_uses(tmp_path) -> None:
    tier = DiskTier(tmp_path, 2**20, "lfu", None)
    tier.store([record("full", place) for place in places(3)])
    names = [Wanted(SHAPES["full"], OURS, places(3)).name(i) for i in range(3)]
    tier.use([names[1]] * 3)
    tier.close()
    again = DiskTier(tmp_path, 2 * record("full", places(1)[0]).num_bytes, "lfu", None)
    again.tidy_up()  # one of the three is too much now
    assert again.num_records == 2 and again.find(names)[1] and again.uses() == {names[1]: 3}


def test_a_tier_folder_that_disappears_is_recreated(tmp_path) -> None:
    folder = tmp_path / "kv"
    tier = DiskTier(folder, 2**20, "lru", None)
    tier.store([record("full", place) for place in places(2)])
    shutil.rmtree(folder)
    wanted = Wanted(SHAPES["full"], OURS, places(2))
    rows = np.empty((2, wanted.shape.num_bytes), np.uint8)
    assert tier.find([wanted.name(0)]) == [False]
    assert tier.load(wanted, rows) == [Loaded.MISSING, Loaded.MISSING]
    tier.tidy_up()
    assert tier.store([record("full", place) for place in places(2)]) == 2, "it is made again"


def test_a_disk_that_refuses_writes_is_still_read(tmp_path, monkeypatch) -> None:
    now = time.time()
    tier = DiskTier(tmp_path, 2**20, "lru", None, clock=lambda: now)
    tier.store([record("full", place) for place in places(2)])

    def fails(*given) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("write_private", "_write_all"):
        monkeypatch.setattr(disk, name, fails)
    now += 3600
    tier.tidy_up()
    wanted = Wanted(SHAPES["full"], OURS, places(2))
    rows = np.empty((2, wanted.shape.num_bytes), np.uint8)
    assert tier.load(wanted, rows) == [Loaded.OK, Loaded.OK]
    tier.close()


def test_only_files_of_the_tier_are_ever_removed(tmp_path) -> None:
    """The folder may have been used for something else."""
    folder = tmp_path / "ab"
    folder.mkdir()
    names = ["notes.txt", "film.part", "film.full", f"{'ab' * 32}.full", f"{'ab' * 32}.full.7.part"]
    for name in names:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    tier = DiskTier(tmp_path, 0, "lru", 1.0)
    tier.tidy_up()
    tier.clear()
    assert sorted(each.name for each in folder.iterdir()) == sorted(names[:3])


def test_another_image_encoder_changes_the_kv_identity(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker_tiers, "store_directory", lambda: tmp_path / "cache" / "models")
    model, encoder = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    model.write_bytes(b"weights")
    runner = SimpleNamespace(
        **dict.fromkeys(("bytes_per_block", "read_blocks", "write_blocks"), len),
        kv_identity="toy",
        spec=SimpleNamespace(block_size=16, window=None),
    )

    def identity(content: bytes, vision: object) -> bytes:
        encoder.write_bytes(content)
        config = SimpleNamespace(ropes=(), vision=vision)
        checkpoint = SimpleNamespace(files=[SimpleNamespace(path=model)])
        source = SimpleNamespace(path=model, config=config, checkpoint=checkpoint)
        return worker_tiers.cache_identity(source, runner)

    assert identity(b"one", "siglip") != identity(b"other", "siglip")
    assert identity(b"one", None) == identity(b"other", None), "nobody reads this file"


def test_a_record_of_another_layout_has_another_version() -> None:
    """Records outlive processes, and cross between engines of one version. If this fails because
    the layout has changed, raise `LAYOUT_VERSION`, and put the new digest here.
    """
    found = hashlib.sha256(b"".join(whole(record(kind, places(2)[1])) for kind in SHAPES))
    assert (LAYOUT_VERSION, found.hexdigest()[:16]) == (1, "25d22665f7f54e42")
