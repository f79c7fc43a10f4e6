"""What lies between a frontend and its engine's process: frames on a socket, a pulse in memory."""

import asyncio
import signal
import socket
import threading

import pytest

from engine.core.errors import EngineError
from engine.core.interfaces.request import (
    Abort,
    Deltas,
    Fatal,
    FromEngine,
    GenerateRequest,
    SamplingParams,
    Stop,
    ToEngine,
    TokenDelta,
)
from engine.core.sandbox import liveness
from engine.core.sandbox.liveness import (
    INTERRUPT_SIGNAL,
    UNKNOWN_STEP_TIMEOUT_S,
    Heartbeat,
    Vitals,
    Watchdog,
    heartbeat_file,
)
from engine.core.shards.link import Seal
from engine.ipc.connection import Connection, QueueChannel, joined
from engine.ipc.transport import (
    LENGTH,
    MAX_FRAME_BYTES,
    ConnectionClosedError,
    FrameDecoder,
    SocketChannel,
    encode_frame,
)

MESSAGES = [
    Abort("r", 3),
    GenerateRequest(
        request_id="r",
        prompt=tuple(range(300)),
        params=SamplingParams(max_tokens=None, seed=2**62, logit_bias={5: -1.5}, stop=("x",)),
        eos_ids=(2, 7),
        priority=-4,
        salt="salt",
        tenant="tenant",
        timeout_s=1.5,
        queue_timeout_s=0.5,
        grammar="start: /x/",
        pools=True,
    ),
    Stop(),
]


@pytest.mark.parametrize("size", [1, 3, 7, 100_000])
def test_messages_are_decoded_for_any_split_of_the_bytes(size):
    data = b"".join(map(encode_frame, MESSAGES))
    frames: FrameDecoder = FrameDecoder(ToEngine)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert [message for piece in pieces for message in frames.feed(piece)] == MESSAGES


async def test_deltas_of_steps_that_arrive_together_are_joined_in_order():
    """Other messages keep their place between them."""
    first, second, third = (Deltas((TokenDelta("r", 0, (token,)),)) for token in range(3))
    messages = []
    data = b"".join(map(encode_frame, [first, second, Fatal("code", "message"), third]))
    Connection(FromEngine, messages.append, print, join=joined).data_received(data)
    both = Deltas(first.deltas + second.deltas)
    assert messages == [both, Fatal("code", "message"), third]


@pytest.mark.parametrize("attack", ["change", "repeat", "drop", "unseal"])
def test_a_sealed_frame_is_taken_only_unchanged_and_in_its_place(attack):
    sent = Seal(b"key")
    first, second = (frame + sent.next(frame) for frame in map(encode_frame, MESSAGES[:2]))
    wrong = {
        "change": first[:-1] + bytes([first[-1] ^ 1]),
        "repeat": first + first,
        "drop": second,
        "unseal": encode_frame(MESSAGES[0]) + second,
    }
    assert FrameDecoder(ToEngine, Seal(b"key")).feed(first + second) == MESSAGES[:2]
    with pytest.raises(EngineError, match="changed on its way"):
        FrameDecoder(ToEngine, Seal(b"key")).feed(wrong[attack])


async def test_a_connection_that_must_be_sealed_is_not_used_without_seals():
    connection = Connection(ToEngine, print, print, is_sealed=True)
    with pytest.raises(EngineError, match="no seals"):
        connection.connection_made(asyncio.Transport())
    assert not connection.is_open and not connection.send(MESSAGES[0])


def test_an_oversized_frame_is_refused_by_its_length_prefix():
    assert FrameDecoder(ToEngine).feed(LENGTH.pack(MAX_FRAME_BYTES)) == []
    with pytest.raises(EngineError, match="over the limit"):
        FrameDecoder(ToEngine).feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


def test_a_message_of_another_kind_is_refused():
    with pytest.raises(Exception, match="(?i)expected"):
        FrameDecoder(ToEngine).feed(encode_frame(TokenDelta("r", 0)))


def test_a_socket_channel_polls_whole_messages_and_reports_the_end():
    ours, theirs = socket.socketpair()
    channel: SocketChannel = SocketChannel(ours, ToEngine)
    with ours, theirs:
        assert channel.poll(0.0) == []
        theirs.sendall(encode_frame(MESSAGES[0])[:5])
        assert channel.poll(5.0) == []
        theirs.sendall(encode_frame(MESSAGES[0])[5:] + encode_frame(MESSAGES[2]))
        assert channel.poll(5.0) == [MESSAGES[0], MESSAGES[2]]
        theirs.close()
        with pytest.raises(ConnectionClosedError):
            channel.poll(5.0)
        with pytest.raises(ConnectionClosedError):
            channel.send(Stop())


def test_a_channel_blocks_while_the_other_side_does_not_read():
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel: SocketChannel = SocketChannel(ours, FromEngine)
    waited, has_sent = threading.Event(), threading.Event()
    channel.on_wait = waited.set
    messages = [Deltas((TokenDelta("r", 0, tuple(range(1000))),)) for _ in range(20)]

    def send() -> None:
        for message in messages:
            channel.send(message)
        has_sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert waited.wait(20) and not has_sent.is_set()
    frames: FrameDecoder = FrameDecoder(FromEngine)
    found = []
    with ours, theirs:
        while len(found) < len(messages):
            found += frames.feed(theirs.recv(3000))
        thread.join(20)
    assert found == messages


def test_a_queue_channel_polls_all_waiting_messages():
    channel = QueueChannel(lambda message: None)
    assert channel.poll(0.0) == []
    for message in MESSAGES:
        channel.inbox.put(message)
    assert channel.poll(0.0) == MESSAGES
    threading.Timer(0.05, channel.inbox.put, (MESSAGES[0],)).start()
    assert channel.poll(30.0) == [MESSAGES[0]]


def test_engine_and_frontend_share_one_heartbeat(monkeypatch):
    now = [5_000_000_000]
    monkeypatch.setattr(liveness.time, "monotonic_ns", lambda: now[0])
    with heartbeat_file() as file:
        engine, frontend = Heartbeat(file.fileno()), Heartbeat(file.fileno())
    assert frontend.vitals() == Vitals(None, UNKNOWN_STEP_TIMEOUT_S, None)
    engine.tick()
    now[0] += 250_000_000
    engine.beat(True, 7.5)
    now[0] += 1_500_000_000
    assert frontend.vitals() == Vitals(step_age_s=1.5, step_timeout_s=7.5, silent_s=1.75)
    engine.beat(False, 0.5)
    assert frontend.vitals() == Vitals(step_age_s=None, step_timeout_s=0.5, silent_s=1.75)
    engine.tick()
    assert frontend.vitals().silent_s == 0.0


def test_a_step_has_stalled_when_it_is_older_than_its_timeout():
    assert not Vitals(None, 1.0, None).is_stalled
    assert not Vitals(1.0, 1.0, None).is_stalled
    assert Vitals(1.1, 1.0, None).is_stalled


class ScriptedHeartbeat(Heartbeat):
    """Shows at each tick whether a step has stalled, as it was told, and then ends its thread."""

    def __init__(self, *stalls: bool) -> None:
        self._stalls = iter((False, *stalls))  # the first tick is made by who starts the thread
        self._is_stalled = False
        self.ended = threading.Event()

    def tick(self) -> None:
        stalled = next(self._stalls, None)
        if stalled is None:
            self.ended.set()
            raise SystemExit
        self._is_stalled = stalled

    def vitals(self) -> Vitals:
        return Vitals(step_age_s=2.0 if self._is_stalled else 0.0, step_timeout_s=1.0, silent_s=0.0)


class StalledLoop:
    """Counts what is asked of it. Who interrupts it asks first whether it computes."""

    num_described = num_interrupted = 0

    @property
    def is_computing(self) -> bool:
        self.num_interrupted += 1
        return False

    def describe(self) -> str:
        self.num_described += 1
        return "a state"


# The script ends the thread by SystemExit.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stalled_step_is_reported_and_interrupted_once():
    before = signal.getsignal(INTERRUPT_SIGNAL)
    loop = StalledLoop()
    heartbeat = ScriptedHeartbeat(True, True, True, False, True, True)
    try:
        Watchdog(heartbeat, tick_s=0.01).watch(loop)
        assert heartbeat.ended.wait(30)
    finally:
        signal.signal(INTERRUPT_SIGNAL, signal.SIG_IGN)  # after an error, more signals may come
        heartbeat.ended.wait(30)
        signal.signal(INTERRUPT_SIGNAL, before)
    assert loop.num_described == 2
    assert 1 <= loop.num_interrupted <= 2, "two signals may arrive as one"
