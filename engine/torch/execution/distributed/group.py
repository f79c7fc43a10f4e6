"""The rank processes of an engine: starts them, sends them frames, and notices when one is lost.

A group lives and dies as a whole. If a rank dies or freezes, all ranks are killed and every later
call raises `RunnerLostError`. The engine then ends, and is restarted like after any other death.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import error_from_code
from engine.core.observability.logging import current_setup
from engine.core.sandbox.liveness import Heartbeat, Silence, heartbeat_file
from engine.core.sandbox.processes import kill_child, start_child
from engine.core.shards.frames import Array, decode_frame, encode_frame
from engine.core.shards.layout import ShardLayout
from engine.core.shards.ring import RingClosedError, RingReader, RingWriter, ring_file
from engine.runtime.model_runner import RunnerConfig, RunnerLostError
from engine.torch.execution.distributed.remote import (
    RemoteRank,
    free_port,
    frozen,
    open_remotes,
)

log = logging.getLogger(__name__)

RANK_MODULE = "engine.torch.execution.distributed.rank"
WATCH_S = 0.1  # how often the group looks for dead and frozen ranks
FROZEN_AFTER_S = 2.5  # a rank ticks twice a second
LOADING_FROZEN_AFTER_S = 60.0
STOP_GRACE_S = 5.0


class RankSetup(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    model_path: str
    config: RunnerConfig
    layout: ShardLayout
    store: str  # the URL by which the ranks find each other
    host: str  # the address at which the other ranks reach those of the engine's machine
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank on this machine, as its engine sees it."""

    process: subprocess.Popen[bytes]
    heartbeat: Heartbeat
    results: RingReader
    silence: Silence

    def trouble(self, frozen_after_s: float) -> str | None:
        status = self.process.poll()
        if status is not None:
            return f"died ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        silent_s = self.silence.counted(self.heartbeat.vitals().silent_s or 0.0)
        return frozen(silent_s, frozen_after_s, self.silence.cause)

    def receive(self) -> bytearray:
        return self.results.receive()

    def kill(self) -> None:
        self.process.kill()

    def end(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_child(self.process)
        self.results.close()


class RankGroup:
    def __init__(self, model: Path, config: RunnerConfig, layout: ShardLayout) -> None:
        self.layout = layout
        self._lost: str | None = None
        self._closing = threading.Event()
        self._frozen_after_s = LOADING_FROZEN_AFTER_S
        self._folder = tempfile.TemporaryDirectory(prefix="engine-ranks-")
        self._local: list[RankProcess] = []
        num_local = layout.num_ranks - config.remote_ranks
        self._remote = open_remotes(config, num_local) if config.remote_ranks else []
        with ring_file() as file:
            pipes = [os.pipe() for _ in range(num_local)]
            try:
                for rank, (bell, _) in enumerate(pipes):
                    self._local.append(_start_rank(rank, file.fileno(), bell))
            finally:
                for bell, _ in pipes:
                    os.close(bell)
            self._ring = RingWriter(file.fileno(), [bell for _, bell in pipes], self.check)
        self._ranks: list[RankProcess | RemoteRank] = [*self._local, *self._remote]
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        self._send_setup(model, config)

    def _send_setup(self, model: Path, config: RunnerConfig) -> None:
        host, store = "127.0.0.1", f"file://{self._folder.name}/store"
        if self._remote:
            host = self._remote[0].link.address
            store = f"tcp://{f'[{host}]' if ':' in host else host}:{free_port(host)}"
        own = replace(config, shard_token="")
        setup = RankSetup(str(model), own, self.layout, store, host, *current_setup())
        self.send(["setup", 0, msgspec.to_builtins(setup)])

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks on this machine."""
        return [rank.process.pid for rank in self._local]

    def wait_until_ready(self) -> list[Any]:
        """Wait until all ranks have loaded. Returns what the sampling rank says of itself."""
        facts: list[list[Any]] = [self._ready(rank) for rank in range(self.layout.num_ranks)]
        self._frozen_after_s = FROZEN_AFTER_S
        return facts[self.layout.sampling_rank]

    def send(self, values: Sequence[Any], arrays: Sequence[Array | None] = ()) -> None:
        """Send a frame to all ranks."""
        self.check()
        frame = encode_frame(values, arrays)
        try:
            for rank in self._remote:
                rank.link.send(frame)
            self._ring.send(frame)
        except RingClosedError:
            self._wait_for_reason()

    def receive(self, rank: int) -> tuple[list[Any], list[Array | None]]:
        """Wait for the next frame from a rank."""
        try:
            values, arrays = decode_frame(self._ranks[rank].receive())
        except RingClosedError:
            self._wait_for_reason()
        if values[0] == "failed":
            raise error_from_code(values[1], values[2])
        return values, arrays

    def check(self) -> None:
        """Raise `RunnerLostError` if a rank is lost."""
        if self._lost is not None:
            raise RunnerLostError(self._lost)

    def close(self) -> None:
        """End all ranks. The group cannot be used afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self.send(["stop", 0])
        except RunnerLostError:
            log.debug("a rank ended before it was asked to")
        deadline = time.monotonic() + STOP_GRACE_S
        for rank in self._ranks:
            rank.end(deadline)
        self._ring.close()
        self._folder.cleanup()

    def _ready(self, rank: int) -> list[Any]:
        values, _ = self.receive(rank)
        assert values[0] == "ready", values[0]
        return values

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_S):
            for number, rank in enumerate(self._ranks):
                trouble = rank.trouble(self._frozen_after_s)
                if trouble is not None:
                    self._end(f"rank {number} of {self.layout.num_ranks} {trouble}")
                    return

    def _end(self, reason: str) -> None:
        if self._closing.is_set():
            return
        self._lost = reason
        log.critical("%s; ending all ranks", reason)
        for rank in self._ranks:
            rank.kill()

    def _wait_for_reason(self) -> None:
        """A pipe of a rank was closed. The watching thread will find out why."""
        self._watcher.join(2 * FROZEN_AFTER_S)
        raise RunnerLostError(self._lost or "a rank closed its connection")


def _start_rank(rank: int, ring: int, bell: int) -> RankProcess:
    reading, writing = os.pipe()
    with ring_file() as results, heartbeat_file() as file:
        fds = (ring, bell, results.fileno(), writing, file.fileno())
        argv = [sys.executable, "-m", RANK_MODULE, *map(str, (rank, os.getpid(), *fds))]
        try:
            process = start_child(argv, fds)
        finally:
            os.close(writing)
        heartbeat = Heartbeat(file.fileno())
        heartbeat.tick()  # the rank is alive until it is silent
        results_of = RingReader(results.fileno(), 0, reading)
        return RankProcess(process, heartbeat, results_of, Silence(process.pid))
