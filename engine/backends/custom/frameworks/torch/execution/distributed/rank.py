"""The entry point of a rank process, which runs the steps of its shard as their frames arrive."""

import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.backends.custom.frameworks.torch.execution.build import (
    local_runner,
    torch_device,
)
from engine.backends.custom.frameworks.torch.execution.distributed.collectives import Ranks
from engine.backends.custom.frameworks.torch.execution.distributed.group import RankSetup
from engine.backends.custom.frameworks.torch.execution.distributed.model_shard import ModelShard
from engine.backends.custom.frameworks.torch.execution.runner import TorchRunner
from engine.backends.custom.frameworks.torch.execution.sampling_runner import StepHandle
from engine.backends.custom.ipc.heartbeat import TICK_S, Heartbeat
from engine.backends.custom.runtime.model_runner import (
    BatchInputs,
    PendingTokens,
    SamplingInputs,
)
from engine.backends.custom.weights.model import open_model
from engine.core.errors import EngineError
from engine.core.observability.logging import setup_logging
from engine.core.sandbox.processes import die_with_parent, offer_to_be_killed
from engine.core.shards.frames import Array, decode_frame, encode_frame
from engine.core.shards.layout import ShardLayout
from engine.core.shards.ring import RingClosedError, RingReader, RingWriter

# The name is not __name__, because this module runs as __main__.
log = logging.getLogger("engine.backends.custom.frameworks.torch.execution.distributed.rank")

PAUSE_S = 0.5
_NO_ROWS = np.zeros(0, np.int32)


def load_shard(setup: RankSetup, rank: int) -> tuple[TorchRunner, Ranks]:
    """Load this rank's cut of the model, and connect it with the other ranks."""
    source = open_model(Path(setup.model_path))
    config = replace(setup.config, device=rank_device(setup.config.device, rank))
    device = torch_device(config.device)
    ranks = Ranks(setup.layout, rank, device, Path(setup.store))
    shard = ModelShard.of(source.config, source.weights, setup.layout, rank, device)
    runner = local_runner(source, config, (shard, ranks))
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

    def run(self, frames: RingReader) -> None:
        """Run until a frame says to stop."""
        while True:
            (kind, step, *rest), arrays = decode_frame(frames.receive())
            if kind == "stop":
                return
            getattr(self, f"_on_{kind}")(step, arrays, *rest)

    def _on_forward(self, step: int, arrays: list[Any]) -> None:
        inputs = BatchInputs(*arrays)
        if not self._has_logits:
            inputs = replace(inputs, logit_rows=_NO_ROWS)
        self._step, self._handle = step, self._runner.forward(inputs)

    def _on_logits(self, step: int, arrays: list[Any]) -> None:
        if self._samples:
            assert step == self._step and self._handle is not None, (step, self._step)
            logits = self._runner.logits(self._handle, arrays[0])
            self._reply(lambda: self._send(["logits", step], [logits]))

    def _on_sample(self, step: int, arrays: list[Any]) -> None:
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
        while True:
            self._answers.get()()


def main(rank: int, parent_pid: int, *fds: int) -> int:
    """Run a rank process. The exit status is 0 only if it was asked to stop, or if its engine is
    gone.
    """
    die_with_parent(parent_pid)
    offer_to_be_killed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when a rank ends
    ring, bell, results, results_bell, heartbeat = fds
    frames, writer = RingReader(ring, rank, bell), RingWriter(results, [results_bell])
    threading.Thread(target=_tick, args=(Heartbeat(heartbeat),), name="tick", daemon=True).start()

    def send(values: list[Any], arrays: list[Array | None] | None = None) -> None:
        writer.send(encode_frame(values, arrays or []))

    try:
        (_, _, plain), _ = decode_frame(frames.receive())
        setup = msgspec.convert(plain, RankSetup)
        setup_logging(setup.log_level, setup.log_format)
        runner, ranks = load_shard(setup, rank)
        send(["ready", 0, msgspec.to_builtins(runner.spec)])
        RankLoop(runner, ranks, setup.layout, send).run(frames)
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


def _tick(heartbeat: Heartbeat) -> None:
    pause = threading.Event()
    heartbeat.tick()
    while not pause.wait(TICK_S):
        heartbeat.tick()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
