"""The parts of shards that need no ranks: layout, frames, the ring, and cuts of weights."""

import hmac
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.architectures.tensors import TensorSpec, Transform
from engine.core.build_name import ADVICE
from engine.core.errors import ConfigError, EngineError
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.layout import ShardLayout, kv_heads_of, share
from engine.core.shards.link import TcpLink, read_token, split_address
from engine.core.shards.ring import RingClosedError, RingReader, RingWriter, ring_file
from engine.torch.execution.distributed.cut import (
    cut,
    cut_experts,
    zeros,
)
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quantize import quantize
from engine.weights.quants import dequantize, traits_of
from engine.weights.weight import Weight

BUILD = "0.1.0+1234abcd"


@pytest.mark.parametrize("unit", [1, 3, 32])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shards_are_even_and_cover_everything(parts: int, unit: int) -> None:
    for count in (7, 96, 100):
        shares = [share(count, parts, index, unit) for index in range(parts)]
        assert [item for each in shares for item in each] == list(range(count))
        units = [-(-len(each) // unit) for each in shares]
        assert max(units) - min(units) <= 1
        assert all(each.start % unit == 0 for each in shares if len(each))


def test_ranks_are_numbered_by_pipeline_stage() -> None:
    layout = ShardLayout(tensor=2, pipeline=3)
    places = [(layout.stage(rank), layout.part(rank)) for rank in range(layout.num_ranks)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert layout.sampling_rank == 4 and list(layout.ranks_of(1)) == [2, 3]


def test_kv_heads_are_replicated_if_there_are_fewer_than_ranks() -> None:
    assert [list(kv_heads_of(2, 4, part)) for part in range(4)] == [[0], [0], [1], [1]]
    assert [list(kv_heads_of(4, 2, part)) for part in range(2)] == [[0, 1], [2, 3]]


def test_frames_carry_arrays_unchanged() -> None:
    arrays = [
        np.arange(7, dtype=np.int32),
        None,
        np.zeros((0, 3), np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.array([True, False]),
    ]
    values, found = decode_frame(bytearray(encode_frame(["forward", 3, "x"], arrays)))
    assert values == ["forward", 3, "x"] and found[1] is None
    for ours, theirs in zip(found, arrays, strict=True):
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
            assert ours.flags.writeable and ours.flags.aligned


@pytest.mark.parametrize("junk", [b"", b"\x01", b"\xff" * 64, encode_frame([1], [np.ones(9)])[:-8]])
def test_bytes_that_are_not_a_frame_are_refused(junk: bytes) -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        decode_frame(junk)


def test_a_frame_of_objects_is_refused() -> None:
    with pytest.raises(KeyError):
        encode_frame([1], [np.zeros(1, object)])
    frame = encode_frame([1], [np.zeros(1, np.int64)])
    unknown = frame.replace(b"\x92\x05\x91\x01", b"\x92\x7f\x91\x01")
    assert unknown != frame
    with pytest.raises(FrameError, match="cannot be read"):
        decode_frame(unknown)


class Rings:
    """A ring of 4 KiB with two readers."""

    def __init__(self, check=lambda: None) -> None:
        with ring_file(4096) as file:
            pipes = [os.pipe() for _ in range(2)]
            self.writer = RingWriter(file.fileno(), [bell for _, bell in pipes], check)
            self.readers = [RingReader(file.fileno(), i, bell) for i, (bell, _) in enumerate(pipes)]


def test_the_ring_loses_nothing_when_full_or_with_oversized_frames() -> None:
    rings = Rings()
    rng = np.random.default_rng(1)
    frames = [rng.bytes(int(size)) for size in rng.integers(1, 9000, 60)]
    found: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        found[index] = [bytes(rings.readers[index].receive()) for _ in frames]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for frame in frames:
        rings.writer.send(frame)
    for thread in threads:
        thread.join(20)
    assert found == [frames, frames]


def test_a_full_ring_warns_once_and_checks_that_readers_are_alive(caplog) -> None:
    class GoneError(Exception):
        pass

    checks = []

    def check() -> None:
        checks.append(1)
        if len(checks) > 3:
            raise GoneError

    rings = Rings(check)
    with pytest.raises(GoneError):
        for _ in range(99):
            rings.writer.send(bytes(1000))
    assert [each.message for each in caplog.records] == [
        "the ring of 4096 bytes is full; waiting for its readers"
    ]
    assert len(rings.readers[0].receive()) == 1000, "what was sent is still there"


def test_both_ends_of_the_ring_notice_that_the_other_closed() -> None:
    rings = Rings()
    rings.readers[1].close()
    with pytest.raises(RingClosedError):
        rings.writer.send(b"frame")
    rings = Rings()
    rings.writer.close()
    with pytest.raises(RingClosedError):
        rings.readers[0].receive()


def stored(dtype: str, shape: tuple[int, ...], reads: list[int] | None = None) -> LazyTensor:
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    raw = quantize(dtype, values).reshape(-1).view(np.uint8)
    return LazyTensor(
        "w", shape, dtype, raw.size, lambda: raw, lambda raw, shape: dequantize(dtype, raw, shape)
    )


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(
    "transform",
    [
        Transform(),
        Transform(before=16, after=32),
        Transform(groups=2, before=8, after=8),
        Transform(head_dim=8, paired=8, added=1.0),
        Transform(before=8, head_dim=16, paired=8, unpaired=4),
    ],
)
def test_a_shard_of_a_weight_equals_a_slice_of_the_whole(dtype: str, transform: Transform) -> None:
    shape = (64, 512)
    weight = Weight(
        TensorSpec("w", shape, "w", "w"),
        (stored(dtype, transform.stored_shape(shape)),),
        transform,
    )
    whole = weight.numpy()
    for rows, columns in (
        (range(16, 48), None),
        (None, range(256, 512)),
        (range(5, 9), range(256)),
        (range(1), range(100, 300)),  # inside of a block
    ):
        part = cut(weight, rows, columns)
        first, second = rows or range(64), columns or range(512)
        expected = whole[first.start : first.stop, second.start : second.stop]
        assert np.array_equal(part.numpy(), expected)
        is_whole = columns is None or columns.start % 256 == columns.stop % 256 == 0
        if is_whole:
            assert part.kernel_dtype == weight.kernel_dtype, "quantized rows stay quantized"
            assert part.tensor.raw().size == traits_of(dtype).num_bytes(expected.size)


def test_transposed_matrices_and_vectors_are_sharded() -> None:
    weight = Weight(
        TensorSpec("w", (6, 8), "w", None),
        (stored("F32", (8, 18)),),
        Transform(transposed=True, before=6, after=6),
    )
    expected = weight.numpy()[2:5, 3:7]
    assert np.array_equal(cut(weight, range(2, 5), range(3, 7)).numpy(), expected)
    bias = Weight(TensorSpec("b", (6,), "b", None), (stored("F32", (18,)),), Transform(before=6))
    assert np.array_equal(cut(bias, range(1, 4)).numpy(), bias.numpy()[1:4])
    assert not zeros(bias).numpy().any() and zeros(bias).numpy().shape == (6,)


def test_experts_are_sharded_individually() -> None:
    spec = TensorSpec("w", (3, 4, 64), "w", None, of_experts=True)
    weight = Weight(spec, (stored("Q8_0", (3, 4, 64)),))
    part = cut(weight, range(1, 3), range(32, 64))
    assert np.array_equal(part.numpy(), weight.numpy()[:, 1:3, 32:])
    assert np.array_equal(cut_experts(weight, range(1, 3)).numpy(), weight.numpy()[1:3])
    assert zeros(weight).numpy().shape == (3, 4, 64)


def test_only_the_rows_of_a_shard_are_read() -> None:
    asked = []

    def rows(begin: int, end: int) -> np.ndarray:
        asked.append((begin, end))
        return np.zeros((end - begin) * 16, np.uint8)

    tensor = LazyTensor("w", (64, 4), "F32", 1024, lambda: rows(0, 64), None, rows)
    cut(Weight(TensorSpec("w", (64, 4), "w", None), (tensor,)), range(8, 16)).tensor.raw()
    assert asked == [(8, 16)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


def meeting(lead: bytes, other: bytes) -> tuple[str, str]:
    """What both ends say of a greeting between an engine and a rank with these tokens."""
    ours, theirs = tcp_pair()
    said = ["", ""]

    def greet() -> None:
        try:
            TcpLink(ours).greet(lead, BUILD)
        except EngineError as error:
            said[0] = error.message

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        TcpLink(theirs).join(other, BUILD)
    except EngineError as error:
        said[1] = error.message
    thread.join(20)
    return said[0], said[1]


def test_ranks_authenticate_with_the_token() -> None:
    assert meeting(b"a" * 16, b"a" * 16) == ("", "")
    engine, rank = meeting(b"a" * 16, b"b" * 16)
    assert engine.endswith("was refused: its token is wrong")
    assert rank == "the engine refused this connection: its token is wrong"


def test_a_rank_of_another_build_is_refused() -> None:
    ours, theirs = tcp_pair()
    rank = TcpLink(theirs)
    greet = TcpLink(ours).greet
    engine = threading.Thread(target=lambda: pytest.raises(ConfigError, greet, b"t", BUILD))
    engine.start()
    _, number = decode_frame(rank.receive())[0]
    proof = hmac.new(b"t", f"join {number} n".encode(), "sha256").hexdigest()
    rank.send(encode_frame(["0.0.1", "n", proof]))
    refusal, _ = decode_frame(rank.receive())[0]
    engine.join(20)
    assert refusal == f"it runs engine 0.0.1, and this engine is {BUILD}; {ADVICE}"


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", bytes(64)])
def test_a_peer_that_is_not_a_rank_is_refused_early(junk: bytes) -> None:
    ours, theirs = tcp_pair()
    theirs.sendall(junk)
    with pytest.raises(FrameError):
        TcpLink(ours).greet(b"a" * 16, BUILD)


def test_rank_tokens_and_addresses_are_validated(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ConfigError, match="shorter than 16"):
        read_token(tmp_path / "short")
    with pytest.raises(ConfigError, match="cannot read the token file"):
        read_token(tmp_path / "none")
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        split_address("machine")
    assert split_address("[::1]:7") == ("::1", 7)
