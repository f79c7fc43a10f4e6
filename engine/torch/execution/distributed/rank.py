"""The entry point of a rank process, which runs the steps of its shard as their frames arrive."""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.core.errors import EngineError, ModelError
from engine.core.observability.logging import setup_logging
from engine.core.sandbox.liveness import TICK_S, Heartbeat
from engine.core.sandbox.processes import die_with_parent, prefer_oom_kill
from engine.core.shards.frames import Array, decode_frame, encode_frame
from engine.core.shards.layout import ShardLayout
from engine.core.shards.link import TcpLink, read_token, split_address
from engine.core.shards.ring import RingClosedError, RingReader, RingWriter
from engine.runtime.model_runner import (
    BatchInputs,
    PendingTokens,
    SamplingInputs,
)
from engine.torch.execution.build import (
    local_runner,
    torch_device,
)
from engine.torch.execution.distributed.collectives import Ranks
from engine.torch.execution.distributed.group import RankSetup
from engine.torch.execution.distributed.model_shard import ModelShard
from engine.torch.execution.distributed.remote import (
    shard_build,
    use_interface,
)
from engine.torch.execution.runner import TorchRunner
from engine.torch.execution.sampling_runner import StepHandle
from engine.weights.model import open_model

# The name is not __name__, because this module runs as __main__.
log = logging.getLogger("engine.torch.execution.distributed.rank")

PAUSE_S = 0.5
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
_NO_ROWS = np.zeros(0, np.int32)


def load_shard(
    setup: RankSetup, rank: int, device: str, own_address: str = LOOPBACK
) -> tuple[TorchRunner, Ranks]:
    """Load this rank's cut of the model, and connect it with the other ranks, which reach it at
    `own_address`.
    """
    source = open_model(Path(setup.model_path))
    place = torch_device(device)
    use_interface(own_address)
    ranks = Ranks(setup.layout, rank, place, setup.store)
    shard = ModelShard.of(source.config, source.weights, setup.layout, rank, place)
    runner = local_runner(source, replace(setup.config, device=device), (shard, ranks))
    source.close()
    return runner, ranks


def rank_device(device: str, rank: int) -> str:
    """The device of a rank: ranks on GPUs use consecutive ones."""
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + rank}" if kind == "cuda" else device


class RankLoop:
    """Runs frames in the order in which they arrive. Only the sampling rank samples and answers."""

    def __init__(
        self, runner: TorchRunner, ranks: Ranks, layout: ShardLayout, send: Callable[..., None]
    ) -> None:
        self._runner, self._ranks, self._send = runner, ranks, send
        self._samples = ranks.rank == layout.sampling_rank
        self._has_logits = layout.stage(ranks.rank) == layout.pipeline - 1
        # The step that was forwarded last, and its handle.
        self._step = 0
        self._handle: StepHandle | None = None
        self._answers: queue.SimpleQueue[Callable[[], None]] | None = None
        if self._samples and runner.spec.depth:
            # The next step is launched before the tokens of this one are on the host.
            self._answers = queue.SimpleQueue()
            threading.Thread(target=self._answer, name="answers", daemon=True).start()

    def run(self, receive: Callable[[], bytearray]) -> None:
        """Run until a frame says to stop."""
        calls = {"forward": self._forward, "logits": self._logits, "sample": self._sample}
        while True:
            (kind, step), arrays = decode_frame(receive())
            if kind == "stop":
                return
            calls[kind](step, arrays)

    def _forward(self, step: int, arrays: list[Any]) -> None:
        inputs = BatchInputs(*arrays)
        if not self._has_logits:
            inputs = replace(inputs, logit_rows=_NO_ROWS)
        self._step, self._handle = step, self._runner.forward(inputs)

    def _logits(self, step: int, arrays: list[Any]) -> None:
        if self._samples:
            assert step == self._step and self._handle is not None, (step, self._step)
            logits = self._runner.logits(self._handle, arrays[0])
            self._reply(lambda: self._send(["logits", step], [logits]))

    def _sample(self, step: int, arrays: list[Any]) -> None:
        handle, self._handle = self._handle, None
        if self._samples:
            assert step == self._step and handle is not None, (step, self._step)
            pending = self._runner.sample(handle, SamplingInputs(*arrays))
            self._reply(lambda: self._send_tokens(step, pending))
        if self._runner.spec.depth:
            self._ranks.copy_tokens(self._runner.last_token)

    def _send_tokens(self, step: int, pending: PendingTokens) -> None:
        output = pending.wait()
        self._send(["tokens", step], [getattr(output, each.name) for each in fields(output)])

    def _reply(self, answer: Callable[[], None]) -> None:
        if self._answers is None:
            answer()
        else:
            self._answers.put(answer)

    def _answer(self) -> None:
        assert self._answers is not None
        try:
            while True:
                self._answers.get()()
        except Exception:
            log.exception("rank %d failed", self._ranks.rank)
            os._exit(1)  # the engine notices, and ends the other ranks


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank on another machine finds its model, its device, and its address. An empty model
    or device is that of the setup.
    """

    model: str
    device: str
    address: str


def serve_rank(
    rank: int,
    receive: Callable[[], bytearray],
    write: Callable[[bytes], None],
    place: RankPlace | None = None,
) -> int:
    """Load a shard and run its steps. The exit status is 0 only if the rank was asked to stop, or
    if its engine is gone.
    """

    def send(values: list[Any], arrays: list[Array | None] | None = None) -> None:
        write(encode_frame(values, arrays or []))

    try:
        (_, _, plain), _ = decode_frame(receive())
        setup = msgspec.convert(plain, RankSetup)
        setup_logging(setup.log_level, setup.log_format)
        device = rank_device(setup.config.device, rank)
        if place is not None:
            device = place.device or setup.config.device.partition(":")[0]
            setup = msgspec.structs.replace(setup, model_path=place.model or setup.model_path)
        own_address = setup.host if place is None else place.address
        runner, ranks = load_shard(setup, rank, device, own_address)
        send(["ready", 0, msgspec.to_builtins(runner.spec)])
        RankLoop(runner, ranks, setup.layout, send).run(receive)
        ranks.close()
    except RingClosedError:
        return 0  # the engine is gone
    except EngineError as error:
        send(["failed", error.error_code, error.message])
        return 1
    except Exception:
        # If another rank was lost, the engine ends this one too, and its error would only distract.
        time.sleep(PAUSE_S)
        log.exception("rank %d failed", rank)
        return 1
    return 0


def main(rank: int, parent_pid: int, *fds: int) -> int:
    """Run a rank process of an engine on this machine."""
    die_with_parent(parent_pid)
    prefer_oom_kill()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when a rank ends
    ring, bell, results, results_bell, heartbeat = fds
    frames, writer = RingReader(ring, rank, bell), RingWriter(results, [results_bell])
    keep_ticking(Heartbeat(heartbeat).tick)
    return serve_rank(rank, frames.receive, writer.send)


def join(address: str, token: bytes, model: str, device: str) -> int:
    """Run a rank for an engine on another machine. `model` and `device` are this machine's; if they
    are empty, the model has the same path as there, and the device is the first of the same kind.
    """
    try:
        link = TcpLink(socket.create_connection(split_address(address), CONNECT_S))
        link.join(token, shard_build())
        (_, rank), _ = decode_frame(link.receive())
    except (OSError, RingClosedError) as error:
        raise ModelError(f"there is no engine at {address}: {error}") from error
    print(f"rank {rank} of the engine at {address}", file=sys.stderr, flush=True)
    keep_ticking(partial(link.send, encode_frame(["tick"])))
    return serve_rank(rank, link.receive, link.send, RankPlace(model, device, link.address))


def keep_ticking(tick: Callable[[], None]) -> None:
    """Show twice a second, from a thread, that this process is alive."""

    def run() -> None:
        pause = threading.Event()
        try:
            while not pause.wait(TICK_S):
                tick()
        except RingClosedError:
            log.debug("the engine is gone")

    tick()
    threading.Thread(target=run, name="tick", daemon=True).start()


def join_main(address: str, token_file: str, model: str, device: str) -> int:
    """Run one session of `engine shard`. The exit status is 2 if trying again would not help."""
    die_with_parent(os.getppid())
    try:
        return join(address, read_token(Path(token_file)), model, device)
    except EngineError as error:
        print(error.message, file=sys.stderr)
        return 1 if isinstance(error, ModelError) else 2


if __name__ == "__main__":
    if sys.argv[1] == "join":
        sys.exit(join_main(*sys.argv[2:]))
    sys.exit(main(*map(int, sys.argv[1:])))
