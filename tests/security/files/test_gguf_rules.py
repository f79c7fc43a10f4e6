"""GGUF headers that lie (SEC-40, SEC-12, FLT-18; T4). One case per rule, refused for its reason.

Every case is a small change to a sound file, so that nothing but the rule can refuse it.
"""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from engine.core.errors import EngineError, ModelFormatError
from engine.weights.gguf import open_gguf
from engine.weights.quants import BY_TYPE_ID
from tests.support.files.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    INT32,
    Q4_0,
    Q8_0,
    STRING,
    UINT32,
    UINT64,
    array,
    assemble,
    entry,
    tensor,
    text,
    u32,
    u64,
)

NAME = entry("general.name", STRING, text("tiny"))
T32 = tensor("t", [32])  # 128 bytes
DATA = bytes(128)


def alignment(value: int, type_id: int = UINT32) -> bytes:
    return entry("general.alignment", type_id, u64(value) if type_id == UINT64 else u32(value))


SOUND = {
    "plain": assemble([NAME], [T32], DATA),
    "two tensors": assemble([], [T32, tensor("u", [32], offset=128)], DATA * 2),
    "gap between tensors": assemble([], [T32, tensor("u", [32], offset=256)], DATA * 3),
    "alignment 8": assemble([alignment(8)], [T32], DATA, alignment=8),
    "alignment 4096": assemble([alignment(4096)], [T32], DATA, alignment=4096),
    "name of 63 bytes": assemble([], [tensor("n" * 63, [32])], DATA),
    "four dimensions": assemble([], [tensor("t", [32, 1, 1, 1])], DATA),
    "quantized row": assemble([], [tensor("t", [64], Q4_0)], bytes(36)),
    "no tensors": assemble([NAME]),
    "empty array": assemble([entry("a", ARRAY, array(INT32, 0))], [T32], DATA),
    "array of strings": assemble([entry("a", ARRAY, array(STRING, 2, text("") * 2))]),
}

DAMAGED: dict[str, tuple[bytes, str]] = {
    # The file as a whole: magic, version, counts.
    "empty": (b"", "the file is empty"),
    "magic": (assemble(magic=b"GGML"), "GGUF magic"),
    "only magic": (b"GGUF", "truncated: version"),
    "version 0": (assemble(version=0), "version 0"),
    "version 1": (assemble(version=1), "version 1"),
    "version of the future": (assemble(version=4), "version 4"),
    "byte-swapped": (assemble(version=3 << 24), "big-endian"),
    "too many tensors": (assemble(num_tensors=65_537), "65537 tensors is more than the limit"),
    "too many entries": (assemble(num_entries=65_537), "65537 metadata entries is more than"),
    "tensor count beyond the file": (assemble(num_tensors=65_536), "truncated: 65536 tensors"),
    "entry count beyond the file": (assemble(num_entries=60_000), "60000 metadata entries"),
    "counts of 2**64 - 1": (assemble(num_tensors=2**64 - 1), "more than the limit"),
    # Metadata.
    "empty key": (assemble([entry("", UINT32, u32(1)) + u32(0)]), "metadata key 0 is empty"),
    "key too long": (assemble([entry("k" * 65_536, UINT32, u32(1))]), "65536 bytes, more than"),
    "key beyond the file": (assemble([u64(60_000) + bytes(64)]), "truncated: metadata key 0"),
    "key is not UTF-8": (
        assemble([entry(b"\xff\xfe", UINT32, u32(1))]),
        "key 0 is not valid UTF-8",
    ),
    "duplicate key": (assemble([NAME, NAME]), "'general.name' appears more than once"),
    "unknown type": (assemble([entry("k", 13, u64(0))]), "'k' has the unknown type 13"),
    "string beyond the file": (
        assemble([entry("k", STRING, u64(1000) + b"short")]),
        "truncated: value of 'k'",
    ),
    "string of 2**64 - 1": (assemble([entry("k", STRING, u64(2**64 - 1))]), "more than the limit"),
    "string over the limit": (
        assemble([entry("k", STRING, text(bytes(2**24 + 1)))]),
        "value of 'k' has 16777217 bytes",
    ),
    "string is not UTF-8": (assemble([entry("k", STRING, text(b"\xc3\x28"))]), "not valid UTF-8"),
    "scalar beyond the file": (
        assemble([entry("key", UINT64, b"1234")], alignment=1),
        "truncated: value of 'key'",
    ),
    "boolean of 2": (assemble([entry("k", BOOL, b"\x02")]), "boolean of value 2"),
    "array beyond the file": (
        assemble([entry("k", ARRAY, array(INT32, 1000, bytes(16)))]),
        "array 'k' of 1000 elements at byte .* needs 4000 bytes",
    ),
    "array of 2**62": (
        assemble([entry("k", ARRAY, array(UINT64, 2**62))]),
        "truncated: array 'k'",
    ),
    "array of 2**62 strings": (
        assemble([entry("k", ARRAY, array(STRING, 2**62))]),
        f"array 'k' of {2**62} strings",
    ),
    "arrays of a million strings": (
        assemble([entry(f"k{n}", ARRAY, array(STRING, 2**19, bytes(2**22))) for n in range(3)]),
        "1572864 strings in arrays is more than the limit",
    ),
    "array string beyond the file": (
        assemble([entry("k", ARRAY, array(STRING, 2, text("ok") + u64(99)))]),
        "truncated: a string of array 'k'",
    ),
    "array string length beyond the file": (
        assemble([entry("k", ARRAY, array(STRING, 3, text("a" * 8) + text("b" * 8)))], alignment=1),
        "truncated: length of a string of array 'k'",
    ),
    "array string over the limit": (
        assemble([entry("k", ARRAY, array(STRING, 1, text(bytes(2**24 + 1))))]),
        "16777217 bytes in a string of array 'k'",
    ),
    "array string is not UTF-8": (
        assemble([entry("k", ARRAY, array(STRING, 1, text(b"\x80")))]),
        "array 'k' holds a string that is not valid UTF-8",
    ),
    "array of arrays": (
        assemble([entry("k", ARRAY, array(ARRAY, 1, array(INT32, 0)))]),
        "array 'k' is an array of arrays",
    ),
    "array of unknown type": (
        assemble([entry("k", ARRAY, array(99, 1, bytes(8)))]),
        "unknown element type 99",
    ),
    "array of bad booleans": (
        assemble([entry("k", ARRAY, array(BOOL, 2, b"\x01\x07"))]),
        "neither 0 nor 1",
    ),
    # Alignment.
    "alignment of another type": (assemble([alignment(32, UINT64)]), "32-bit unsigned"),
    "alignment 0": (assemble([alignment(0)]), "general.alignment 0"),
    "alignment 1": (assemble([alignment(1)]), "general.alignment 1"),
    "alignment 48": (assemble([alignment(48)]), "general.alignment 48"),
    "alignment 8192": (assemble([alignment(8192)]), "general.alignment 8192"),
    # Tensor records.
    "empty tensor name": (
        assemble([], [tensor("", [32]) + b"x"], DATA),
        "tensor 0 has an empty name",
    ),
    "tensor name of 64 bytes": (assemble([], [tensor("n" * 64, [32])], DATA), "has 64 bytes"),
    "duplicate tensor": (
        assemble([], [T32, tensor("t", [32], offset=128)], DATA * 2),
        "tensor 't' appears more than once",
    ),
    "no dimensions": (assemble([], [tensor("name", []) + bytes(8)], DATA), "0 dimensions"),
    "five dimensions": (assemble([], [tensor("t", [32, 1, 1, 1, 1])], DATA), "5 dimensions"),
    "2**32 - 1 dimensions": (
        assemble([], [text("t") + u32(2**32 - 1) + bytes(20)], DATA),
        "4294967295 dimensions",
    ),
    "dimension of 0": (assemble([], [tensor("t", [32, 0])], DATA), "dimension of 0"),
    "dimension of 2**31": (assemble([], [tensor("t", [2**31])], DATA), "dimension of 2147483648"),
    "product of 2**62": (
        assemble([], [tensor("t", [2**31 - 32, 2**31 - 1])], DATA),
        "more than any file can hold",
    ),
    "product that wraps to 0": (
        assemble([], [tensor("t", [2**30, 2**30, 2**4])], DATA),
        "more than any file can hold",
    ),
    "unsupported type": (assemble([], [tensor("t", [32], 24)], DATA), "unsupported type I8 "),
    "removed type": (assemble([], [tensor("t", [32], 4)], DATA), "unsupported type Q4_2 "),
    "type of the future": (
        assemble([], [tensor("t", [32], 999)], DATA),
        "number 999, which no known version",
    ),
    "row of half a block": (
        assemble([], [tensor("t", [48], Q8_0)], DATA),
        "whole Q8_0 blocks of 32",
    ),
    "two rows of half a block": (
        assemble([], [tensor("t", [16, 2], Q8_0)], DATA),
        "rows of 16 values are not whole Q8_0 blocks of 32",
    ),
    # Tensor data.
    "offset not aligned": (
        assemble([], [tensor("t", [8], offset=8)], DATA),
        "offset 8 is not a multiple of 32",
    ),
    "tensor past the end": (
        assemble([], [T32], DATA[:-1]),
        "'t' ends at byte .* past the end .*truncated",
    ),
    "offset past the end": (assemble([], [tensor("t", [32], offset=2**40)], DATA), "past the end"),
    "offset of 2**64 - 32": (
        assemble([], [tensor("t", [32], offset=2**64 - 32)], DATA),
        "past the end",
    ),
    "overlap": (
        assemble([], [T32, tensor("u", [32], offset=96)], DATA * 2),
        "'t' and 'u' overlap",
    ),
    "the same bytes twice": (assemble([], [T32, tensor("u", [32])], DATA), "overlap"),
    # Other formats under this name.
    "pickle": (b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.", "a pickle"),
    "torch zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
}


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def use_mmap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("case", SOUND)
def test_valid_gguf_files_are_read(tmp_path: Path, case: str, use_mmap: bool) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SOUND[case])
    for stored in open_gguf(path, use_mmap).tensors.values():
        assert stored.raw().size == stored.nbytes


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_gguf_is_refused_for_its_reason(tmp_path: Path, case: str, use_mmap: bool) -> None:
    content, reason = DAMAGED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match=rf"m\.gguf: .*{reason}"):
            open_gguf(path, use_mmap)
        # Lengths are believed only as far as the file goes.
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content) + 2**20
    finally:
        tracemalloc.stop()


def test_every_truncation_of_a_gguf_is_refused(tmp_path: Path) -> None:
    whole = assemble(
        [NAME, entry("tokens", ARRAY, array(STRING, 3, text("a") + text("bc") + text("")))],
        [T32, tensor("u", [32], Q8_0, offset=128)],
        bytes(128 + 34),
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    open_gguf(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError):
            open_gguf(path)


def test_random_gguf_damage_raises_only_model_format_errors(tmp_path: Path) -> None:
    """Whatever the bytes: a checkpoint whose views lie inside the file, or an `EngineError`."""
    rng = random.Random(7)
    whole = assemble(
        [NAME, alignment(32), entry("k", ARRAY, array(STRING, 2, text("one") + text("two")))],
        [tensor("t", [32, 2], F32), tensor("u", [64], Q4_0, offset=256)],
        bytes(256 + 36),
    )
    header = len(whole) - 292
    edges = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)]
    path = tmp_path / "m.gguf"
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(header)
            patch = rng.choice(edges) if rng.random() < 0.5 else bytes([rng.randrange(256)])
            damaged[place : place + len(patch)] = patch
        path.write_bytes(damaged)
        try:
            checkpoint = open_gguf(path)
        except EngineError:
            continue
        for stored in checkpoint.tensors.values():
            assert stored.raw().size == stored.nbytes
            assert stored.numpy().shape == stored.shape


def test_removed_and_integer_gguf_types_are_not_supported() -> None:
    """Type numbers 4 and 5 were removed from the format, 24 to 28 are integers and doubles."""
    assert not BY_TYPE_ID.keys() & {4, 5, 9, 15, 24, 25, 26, 27, 28}


def test_parts_of_a_split_gguf_must_not_be_links_out_of_the_folder(tmp_path: Path) -> None:
    count = entry("split.count", UINT32, u32(2))
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(assemble([count, entry("split.no", UINT32, u32(1))]))
    directory = tmp_path / "model"
    directory.mkdir()
    first = directory / "m-00001-of-00002.gguf"
    first.write_bytes(assemble([count, entry("split.no", UINT32, u32(0))]))
    (directory / "m-00002-of-00002.gguf").symlink_to(outside)
    with pytest.raises(ModelFormatError, match="link out of the model directory"):
        open_gguf(first)


def test_pickle_formats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(SOUND["plain"])
    with pytest.raises(ModelFormatError, match="never loaded"):
        open_gguf(path)
