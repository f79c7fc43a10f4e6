"""Reading GGUF files: values, laziness, sets of parts."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.core.errors import ModelError, ModelFormatError
from engine.weights.files import FileBytes
from engine.weights.gguf import open_gguf
from tests.support.files.gguf_files import assemble, tensor

VALUES = np.arange(96, dtype=np.float32).reshape(3, 32)


def write(path: Path, **options: int) -> None:
    """Six tensors and one metadata entry of every kind, by the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve ☕")
    writer.add_array("a.strings", ["", "Ġthe", "☕"])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    for index in range(6):
        writer.add_tensor(f"t{index}.weight", VALUES + index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("use_mmap", [True, False])
def test_gguf_values_equal_those_written(tmp_path: Path, use_mmap: bool) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    checkpoint = open_gguf(path, use_mmap)
    metadata = {key[2:]: value for key, value in checkpoint.metadata.items() if key[:2] == "a."}
    floats, ints, bools = (metadata.pop(key) for key in ("floats", "ints", "bools"))
    assert metadata == {
        "u8": 200,
        "i8": -100,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "string": "naïve ☕",
        "strings": ["", "Ġthe", "☕"],
    }
    assert metadata["bool"] is True
    assert (floats.dtype, floats.tolist()) == (np.float32, [0.5, -1.5])
    assert (ints.dtype, ints.tolist()) == (np.int32, [1, -2, 3])
    assert (bools.dtype, bools.tolist()) == (np.bool_, [True, False])
    assert list(checkpoint.tensors) == [f"t{index}.weight" for index in range(6)]
    for index, stored in enumerate(checkpoint.tensors.values()):
        assert (stored.shape, stored.dtype, stored.nbytes) == ((3, 32), "F32", 384)
        assert np.array_equal(stored.numpy(), VALUES + index)


def test_gguf_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(assemble([], [tensor("t", [8])], bytes(32), version=2))
    assert open_gguf(path).tensors["t"].shape == (8,)


def test_opening_a_gguf_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    asked: list[tuple[int, int]] = []
    view = FileBytes.view

    def recorded(self: FileBytes, start: int, num_bytes: int) -> np.ndarray:
        asked.append((start, num_bytes))
        return view(self, start, num_bytes)

    monkeypatch.setattr(FileBytes, "view", recorded)
    checkpoint = open_gguf(path)
    assert asked == []
    raw = checkpoint.tensors["t5.weight"].raw()
    assert asked == [(path.stat().st_size - 384, 384)]
    assert not raw.flags.owndata and not raw.flags.writeable


def test_tensor_views_outlive_close_but_new_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    checkpoint = open_gguf(path)
    raw = checkpoint.tensors["t1.weight"].raw()
    checkpoint.close()
    assert np.array_equal(raw.view("<f4").reshape(3, 32), VALUES + 1)
    with pytest.raises(ModelError, match="closed"):
        checkpoint.tensors["t1.weight"].raw()


class TestParts:
    """Sets of three files with two tensors each."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write(tmp_path / "m.gguf", split_max_tensors=2)
        found = sorted(tmp_path.iterdir())
        assert [path.name for path in found] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        return found

    @pytest.mark.parametrize("opened", [0, 1, 2])
    def test_any_part_of_a_split_gguf_opens_the_whole(self, parts: list[Path], opened: int) -> None:
        checkpoint = open_gguf(parts[opened])
        assert checkpoint.metadata["a.string"] == "naïve ☕"
        for index in range(6):
            assert np.array_equal(checkpoint.tensors[f"t{index}.weight"].numpy(), VALUES + index)

    def test_a_missing_gguf_part_is_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(ModelError, match="00002-of-00003"):
            open_gguf(parts[0])

    def test_a_part_with_the_wrong_number_is_refused(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(ModelFormatError, match=r"00002-of-00003.*split\.no"):
            open_gguf(parts[0])

    def test_parts_with_fewer_tensors_than_stated_are_refused(self, parts: list[Path]) -> None:
        head = parts[0].read_bytes()
        count = b"split.tensors.count\x05\x00\x00\x00"
        assert count + b"\x06" in head
        parts[0].write_bytes(head.replace(count + b"\x06", count + b"\x07"))
        with pytest.raises(ModelFormatError, match=r"split\.tensors\.count is 7.* hold 6"):
            open_gguf(parts[0])

    def test_a_tensor_in_two_parts_is_refused(self, parts: list[Path]) -> None:
        body = parts[2].read_bytes()
        parts[2].write_bytes(body.replace(b"t5.weight", b"t0.weight"))
        with pytest.raises(ModelFormatError, match=r"'t0\.weight' is also in another part"):
            open_gguf(parts[0])

    def test_a_renamed_part_of_a_set_is_refused(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
        with pytest.raises(ModelFormatError, match="part of a set"):
            open_gguf(renamed)

    def test_an_impossible_part_number_is_refused(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("m-00004-of-00003.gguf"))
        with pytest.raises(ModelFormatError, match="part 4 of 3"):
            open_gguf(renamed)
