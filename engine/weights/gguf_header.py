"""Parses the header of one GGUF file, which has the metadata and the tensor offsets. The file is
not trusted.

All reads go through a cursor that knows how many bytes are left. So every length that the file
states is checked before it is used. Sizes are Python ints, which cannot overflow.
"""

from itertools import repeat
from math import prod
from mmap import mmap
from struct import Struct
from struct import error as StructError
from typing import Any, NoReturn

import msgspec
import numpy as np

from engine.core.errors import ModelFormatError
from engine.weights.quants import BY_TYPE_ID, QuantTraits

MAX_RECORDS = 65_536  # max number of tensors, and of metadata entries
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 * 1024 * 1024
# Max number of strings in all arrays of the metadata. Large vocabularies have 800,000 tokens and
# merges together. The limit bounds memory, because a short string takes six times as many bytes in
# Python as in the file.
MAX_STRINGS = 1 << 20
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MAX_DIM = 2**31 - 1
MAX_TENSOR = 2**48  # a tensor has fewer elements than this, and fewer bytes
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_DEFAULT_ALIGNMENT = 32

_U32, _U64 = Struct("<I"), Struct("<Q")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: _U32,
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<B"),
    10: _U64,
    11: Struct("<q"),
    12: Struct("<d"),
}
# Tensor types that the format has or had, and that no model needs: sums for dot products, integers,
# and formats that were removed.
_OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"},
    **{37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
_NUMPY_TYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor's type, shape and place in the file. `shape` is row-major. `start` is the byte
    offset from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    traits: QuantTraits
    start: int
    num_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def _is_text(start: bytes) -> bool:
    return all(each >= 0x20 or each in b"\t\n\r" for each in start)


def read_header(buffer: mmap | bytes, name: str) -> GgufHeader:
    """Parse and check the whole header. `name` is the file's name, for error messages."""
    cursor = _Cursor(buffer, name)
    if cursor.take(4, "magic") != b"GGUF":
        kind = "holds text" if _is_text(buffer[:256]) else "is of another kind"
        cursor.fail(
            f"the file does not start with the GGUF magic, because it {kind}; name a .gguf file, a"
            " folder with config.json and safetensors, or a model that `engine list` shows"
        )
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3)
        why = "big-endian files are not supported" if swapped else "supported: 2 and 3"
        cursor.fail(f"GGUF version {version} ({why})")
    num_tensors = cursor.count("tensors", MAX_RECORDS, cursor.u64("tensor count"))
    num_entries = cursor.count("metadata entries", MAX_RECORDS, cursor.u64("entry count"))
    needed = num_tensors * _MIN_TENSOR_BYTES + num_entries * _MIN_ENTRY_BYTES
    cursor.require(needed, f"{num_tensors} tensors and {num_entries} metadata entries")
    metadata, alignment = _read_metadata(cursor, num_entries)
    tensors = _read_tensors(cursor, num_tensors, alignment)
    return GgufHeader(metadata, tensors)


class _Cursor:
    """A read position in the file. Reading past the end raises an error."""

    def __init__(self, buffer: mmap | bytes, name: str) -> None:
        self._buffer = buffer
        self._name = name
        self._size = len(buffer)
        self._num_strings = 0
        self.position = 0

    @property
    def size(self) -> int:
        return self._size

    def fail(self, reason: str) -> NoReturn:
        raise ModelFormatError(f"{self._name}: {reason}")

    def require(self, num_bytes: int, what: str) -> None:
        remaining = self._size - self.position
        if num_bytes > remaining:
            self.fail(
                f"truncated: {what} at byte {self.position} needs {num_bytes} bytes, "
                f"{remaining} remain; copy or download the file again"
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        start = self.position
        self.position = start + num_bytes
        return self._buffer[start : self.position]

    def scalar(self, layout: Struct, what: str) -> Any:
        return layout.unpack(self.take(layout.size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.scalar(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(_U64, what))

    def count(self, what: str, limit: int, value: int) -> int:
        if value > limit:
            self.fail(f"{value} {what} is more than the limit of {limit}")
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            self.fail(f"{what} has {length} bytes, more than the limit of {limit}")
        return self._decode(self.take(length, what), what)

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` consecutive strings. The code of `string` is inlined for speed, because
        vocabularies are long.

        Each string must end before the file does. The limit on the length of a string is checked
        only if the whole array has more bytes than this limit.
        """
        self._num_strings += count
        self.count("strings in arrays", MAX_STRINGS, self._num_strings)
        buffer, size, position = self._buffer, self._size, self.position
        read_length = _U64.unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in repeat(None, count):
                start = position + 8
                (length,) = read_length(buffer, position)
                position = start + length
                if position > size:
                    self.position = start
                    self.require(length, f"a string of {what}")
                append(buffer[start:position].decode())
        except StructError:
            self.position = position
            self.require(8, f"length of a string of {what}")
        except UnicodeDecodeError:
            self.fail(f"{what} holds a string that is not valid UTF-8")
        if position - self.position > MAX_STRING_BYTES:
            longest = max(len(string.encode()) for string in result)
            self.count(f"bytes in a string of {what}", MAX_STRING_BYTES, longest)
        self.position = position
        return result

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")


def _read_metadata(cursor: _Cursor, num_entries: int) -> tuple[dict[str, Any], int]:
    metadata: dict[str, Any] = {}
    alignment = _DEFAULT_ALIGNMENT
    for index in range(num_entries):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            cursor.fail(f"metadata key {index} is empty")
        if key in metadata:
            cursor.fail(f"metadata key '{key}' appears more than once")
        type_id = cursor.u32(f"type of '{key}'")
        metadata[key] = _read_value(cursor, type_id, key)
        if key == "general.alignment":
            if type_id != _UINT32:
                cursor.fail("general.alignment must be a 32-bit unsigned integer")
            alignment = metadata[key]
            if not 8 <= alignment <= 4096 or alignment & (alignment - 1):
                cursor.fail(f"general.alignment {alignment} is not a power of two in 8..4096")
    return metadata, alignment


def _read_value(cursor: _Cursor, type_id: int, key: str) -> Any:
    if type_id == _STRING:
        return cursor.string(f"value of '{key}'")
    if type_id == _ARRAY:
        return _read_array(cursor, key)
    if type_id not in _SCALARS:
        cursor.fail(f"metadata key '{key}' has the unknown type {type_id}")
    value = cursor.scalar(_SCALARS[type_id], f"value of '{key}'")
    if type_id != _BOOL:
        return value
    if value > 1:
        cursor.fail(f"metadata key '{key}' is a boolean of value {value}")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> Any:
    """Read an array. Strings become a list. Numbers become a numpy array, which is a copy, so it
    stays valid when the file is closed.
    """
    what = f"array '{key}'"
    type_id = cursor.u32(f"element type of {what}")
    count = cursor.u64(f"length of {what}")
    if type_id == _ARRAY:
        cursor.fail(f"{what} is an array of arrays, which no known model needs")
    if type_id == _STRING:
        cursor.require(count * 8, f"{what} of {count} strings")
        return cursor.strings(count, what)
    if type_id not in _SCALARS:
        cursor.fail(f"{what} has the unknown element type {type_id}")
    raw = cursor.take(count * _SCALARS[type_id].size, f"{what} of {count} elements")
    values = np.frombuffer(raw, _NUMPY_TYPES[type_id])
    if type_id != _BOOL:
        return values
    if values.size and values.max() > 1:
        cursor.fail(f"{what} holds a boolean that is neither 0 nor 1")
    return values.astype(np.bool_)


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    records = [_read_tensor_record(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, traits, offset in records:
        if name in tensors:
            cursor.fail(f"tensor '{name}' appears more than once")
        if offset % alignment:
            cursor.fail(f"tensor '{name}': offset {offset} is not a multiple of {alignment}")
        num_bytes = traits.num_bytes(prod(shape))
        start = data_start + offset
        if start + num_bytes > cursor.size:
            cursor.fail(
                f"tensor '{name}' ends at byte {start + num_bytes}, past the end of the file "
                f"({cursor.size} bytes); the file is truncated or was not fully downloaded; "
                "copy or download it again"
            )
        tensors[name] = TensorInfo(name, shape, traits, start, num_bytes)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for before, after in zip(in_order, in_order[1:], strict=False):
        if before.start + before.num_bytes > after.start:
            cursor.fail(f"tensors '{before.name}' and '{after.name}' overlap")
    return tuple(tensors.values())


def _read_tensor_record(
    cursor: _Cursor, index: int
) -> tuple[str, tuple[int, ...], QuantTraits, int]:
    name = cursor.string(f"name of tensor {index}", MAX_NAME_BYTES)
    if not name:
        cursor.fail(f"tensor {index} has an empty name")
    num_dims = cursor.u32(f"dimension count of '{name}'")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"tensor '{name}' has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(f"dimensions of '{name}'") for _ in range(num_dims)]
    for dim in dims:
        if not 1 <= dim <= MAX_DIM:
            cursor.fail(f"tensor '{name}' has a dimension of {dim}; 1 to {MAX_DIM} are allowed")
    type_id = cursor.u32(f"type of '{name}'")
    offset = cursor.u64(f"offset of '{name}'")
    if type_id not in BY_TYPE_ID:
        known = ", ".join(traits.name for traits in BY_TYPE_ID.values())
        named = _OTHER_TYPES.get(type_id, f"number {type_id}, which no known version of GGUF has")
        cursor.fail(f"tensor '{name}' has the unsupported type {named} (supported: {known})")
    traits = BY_TYPE_ID[type_id]
    if dims[0] % traits.block_elems:
        cursor.fail(
            f"tensor '{name}': rows of {dims[0]} values are not whole {traits.name} blocks "
            f"of {traits.block_elems}"
        )
    if prod(dims) >= MAX_TENSOR or traits.num_bytes(prod(dims)) >= MAX_TENSOR:
        cursor.fail(f"tensor '{name}' has {prod(dims)} values, more than any file can hold")
    return name, tuple(reversed(dims)), traits, offset
