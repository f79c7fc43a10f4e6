"""The entry point of the engine process.

The process reads its options from the inherited socket, plans memory, loads the model and sends
`Ready`. It then serves until its frontend stops it or disappears. If the engine is used as a
library, there is no engine process. Then `run_engine` is called in a thread.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports create almost no garbage either

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.core import faults
from engine.core.errors import EngineError, ResourceError
from engine.core.interfaces.request import Fatal, Ready, Stop, ToEngine, Validate, Validated
from engine.core.observability.logging import setup_logging
from engine.core.sandbox.exhaustion import what_ran_out
from engine.core.sandbox.liveness import (
    UNKNOWN_STEP_TIMEOUT_S,
    Heartbeat,
    Pulse,
    Watchdog,
)
from engine.core.sandbox.processes import die_with_parent, keep_all, prefer_oom_kill
from engine.core.sandbox.validation_child import Fork
from engine.ipc.engine_process import STACKS_SIGNAL
from engine.ipc.options import EngineOptions
from engine.ipc.transport import Channel, ConnectionClosedError, SocketChannel
from engine.runners.entry import framework_entry
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.dummy_batch import warm_up
from engine.runtime.groups.states import state_group
from engine.runtime.groups.windows import window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import (
    AdapterRunner,
    DeviceInfo,
    ModelRunner,
    RunnerConfig,
    RunnerSpec,
    Warmable,
)
from engine.runtime.radix_cache import RadixCache
from engine.runtime.requests.grammar import Grammars, Vocabulary
from engine.runtime.requests.images import ImageStore, check_image_rows
from engine.runtime.scheduler import Scheduler
from engine.runtime.speculation.drafts import Speculation, speculates
from engine.weights.model import ModelSource, open_model
from engine.worker.encoder_loop import Encoder, EncoderLoop, is_encoder
from engine.worker.encoder_loop import warm_up as warm_up_encoder
from engine.worker.loading import load_encoder, load_images, load_runner
from engine.worker.memory import MemoryPlan

if TYPE_CHECKING:
    from engine.runtime.groups.adapter_slots import AdapterSlots
    from engine.runtime.speculation.draft_model import DraftModel
    from engine.runtime.speculation.model_drafts import ModelDrafts

# The name is not __name__, because this module runs as __main__.
log = logging.getLogger("engine.worker.main")

OPTIONS_TIMEOUT_S = 30.0


def planned(options: EngineOptions) -> EngineOptions:
    """The options, with all sizes chosen that the settings leave to the engine."""
    device = framework_entry(options.framework).find_device(options.device, options.dtype)
    return options.planned(device.name, device.free_bytes, os.cpu_count() or 1)


def build_scheduler(spec: RunnerSpec, options: EngineOptions, bytes_per_token: int) -> Scheduler:
    pool = BlockPool(spec.num_blocks)
    windows = window_group(spec, max_step_tokens(spec, options))
    states = state_group(spec) if options.cache_enabled else None
    groups = [group for group in (windows, states) if group is not None]
    radix = RadixCache(
        pool,
        spec.block_size,
        options.eviction_policy,
        options.cache_ttl_s,
        columns=[group.column for group in groups],
    )
    limit, target = options.cache_bytes, options.kv_target_bytes
    block_bytes = bytes_per_token * spec.block_size
    kv = KVCache(
        pool,
        radix,
        spec.block_size,
        sharing=options.cache_enabled,
        max_cached_blocks=limit // block_bytes if limit is not None else None,
        max_cached_sequences=options.cache_max_sequences,
        target_blocks=target // block_bytes if target is not None else None,
        groups=groups,
    )
    return Scheduler(kv, spec.max_slots, max_step_tokens(spec, options))


def max_step_tokens(spec: RunnerSpec, options: EngineOptions) -> int:
    return min(options.max_batch_tokens, spec.max_step_tokens or options.max_batch_tokens)


def build_loop(
    runner: ModelRunner,
    options: EngineOptions,
    bytes_per_token: int,
    channel: Channel,
    pulse: Pulse | None = None,
    grammars: Grammars | None = None,
    images: ImageStore | None = None,
    source: ModelSource | None = None,
    draft: "DraftModel | None" = None,
) -> EngineLoop:
    """Builds the engine loop of a loaded model, with scheduler, cache, step budget and grammars."""
    spec = runner.spec
    scheduler = build_scheduler(spec, options, bytes_per_token)
    if images is not None:
        room = max_step_tokens(spec, options) - spec.max_slots
        check_image_rows(min(room, scheduler.kv.max_row), images)
    budget = StepBudget.of(spec, max_step_tokens(spec, options))
    if options.tiers is not None or options.peers is not None:
        from engine.worker.tiers import add_tiers  # few engines have tiers

        kv = scheduler.kv
        add_tiers(options.tiers, options.peers, kv, runner, source, budget.prompt_s)
    if speculates(spec, options.speculation if draft is None else "on"):
        scheduler.attach(Speculation(scheduler.kv, budget, _model_drafts(draft, budget)))
    grammars = grammars or Grammars(functools.partial(_vocabulary, options))
    adapters = None
    if options.max_adapters and source is not None and isinstance(runner, AdapterRunner):
        adapters = functools.partial(_adapter_slots, runner, options, source)
    return EngineLoop(
        scheduler, runner, channel, budget, options.max_queued, pulse, grammars, images, adapters
    )


def _adapter_slots(*arguments: Any) -> "AdapterSlots":
    from engine.worker.adapter_slots import adapter_slots  # few engines have adapters

    return adapter_slots(*arguments)


def _model_drafts(draft: "DraftModel | None", budget: StepBudget) -> "ModelDrafts | None":
    if draft is None:
        return None
    from engine.runtime.speculation.model_drafts import ModelDrafts  # few need it

    return ModelDrafts(draft, budget)


def _vocabulary(options: EngineOptions) -> Vocabulary:
    # In the engine process, only grammars need the tokenizer.
    from engine.core.text.tokenizer import Tokenizer
    from engine.frontend.text_cache import TextCache, key_of

    path = Path(options.model_path)
    key = key_of(path)
    facts = None if key is None else TextCache().read(path, key)
    if facts is not None:
        tokenizer, config = Tokenizer.from_tables(facts.tables), facts.config
        return Vocabulary.of(tokenizer, config.vocab_size, config.eos_ids)
    # This import takes long, because it loads the code for chat templates, too.
    from engine.frontend.text_model import load_text

    return load_text(path).vocabulary()


def run_engine(
    options: EngineOptions,
    channel: Channel,
    pulse: Pulse,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Load the model, send `Ready`, and serve. Returns when a `Stop` message arrives. Raises on a
    fatal error.
    """
    started_at = time.monotonic()
    source = open_model(Path(options.model_path), use_mmap=options.use_mmap)
    options = planned(options)
    if is_encoder(source.config):
        encoder, device = load_encoder(source, options)
        on_loaded()
        _run_encoder(encoder, device, options, channel, pulse, started_at)
        return
    grammars = Grammars(functools.partial(_vocabulary, options))
    grammars.prepare()
    if not options.draft_model:
        loaded, draft = load_runner(source, options), None
    else:
        from engine.worker.draft import plan_draft  # few engines have one

        planned_draft = plan_draft(source, options)
        loaded = load_runner(source, options, planned_draft.num_bytes)
        draft = planned_draft.load(options.framework, loaded[1])
    images = load_images(source, options, loaded)
    told = (loaded, options, channel, pulse, on_loaded, started_at)
    serve_runner(*told, grammars, images=images, source=source, draft=draft)


def serve_runner(
    loaded: tuple[ModelRunner, RunnerConfig, MemoryPlan],
    options: EngineOptions,
    channel: Channel,
    pulse: Pulse,
    on_loaded: Callable[[], None],
    started_at: float,
    grammars: Grammars | None = None,
    images: ImageStore | None = None,
    source: ModelSource | None = None,
    draft: "DraftModel | None" = None,
) -> None:
    """Warm up the loaded runner, send `Ready`, and run its loop until a `Stop` message arrives."""
    runner, config, plan = loaded
    if isinstance(runner, Warmable):
        runner.warm()
    if grammars is not None:
        grammars.finish_preparing()
    warm_up(runner)
    on_loaded()
    loop = build_loop(
        runner, options, plan.bytes_per_token, channel, pulse, grammars, images, source, draft
    )
    spec, kv = runner.spec, loop.scheduler.kv
    channel.send(
        Ready(
            max_seq_len=spec.max_seq_len,
            num_blocks=spec.num_blocks - 1,
            block_size=spec.block_size,
            max_slots=spec.max_slots,
            dtype=config.dtype,
            device=config.device,
            load_s=time.monotonic() - started_at,
            speculates=loop.scheduler.find(Speculation) is not None,
            cache_identity=b"".join(each.identity for each in kv.extensions).hex(),
        )
    )
    loop.run()
    if draft is not None:
        draft.close()


def _run_encoder(
    encoder: Encoder,
    device: DeviceInfo,
    options: EngineOptions,
    channel: Channel,
    pulse: Pulse,
    started_at: float,
) -> None:
    warm_up_encoder(encoder)
    longest = encoder.spec.max_seq_len
    loop = EncoderLoop(encoder, channel, options.max_batch_tokens, options.max_queued, pulse)
    channel.send(
        Ready(
            max_seq_len=min(longest, options.max_seq_len or longest),
            num_blocks=0,
            block_size=options.block_size,
            max_slots=options.max_slots,
            dtype=device.dtype,
            device=device.name,
            load_s=time.monotonic() - started_at,
        )
    )
    loop.run()


class RunEngine(Protocol):
    """The signature of `run_engine`."""

    def __call__(
        self,
        options: EngineOptions,
        channel: Channel,
        pulse: Pulse,
        on_loaded: Callable[[], None],
    ) -> None: ...


def main(
    socket_fd: int, heartbeat_fd: int, parent_pid: int, *, run: RunEngine | None = None
) -> int:
    """Run the engine process. The exit status is 0 only if the process was asked to stop or its
    frontend is gone.
    """
    die_with_parent(parent_pid)
    prefer_oom_kill()
    gc.disable()  # off until the model is loaded, because loading creates almost no garbage
    # Ctrl-C is ignored, because it also reaches the frontend, which decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    sock = socket.socket(fileno=socket_fd)
    channel: SocketChannel[ToEngine] = SocketChannel(sock, ToEngine)
    answering: threading.Thread | None = None

    def finish_answer() -> None:
        if answering is not None:
            answering.join()

    def on_loaded() -> None:
        finish_answer()
        keep_all()

    try:
        options, answering = _read_options(sock)
        setup_logging(options.log_level, options.log_format)
        faults.arm()
        watchdog = Watchdog(Heartbeat(heartbeat_fd))
        # An engine that waits for its frontend does not hang.
        channel.on_wait = lambda: watchdog.beat(False, UNKNOWN_STEP_TIMEOUT_S)
        (run or run_engine)(options, channel, watchdog, on_loaded)
    except ConnectionClosedError:
        return 0  # the frontend is gone
    except EngineError as error:
        finish_answer()
        channel.send(Fatal(error.error_code, error.message))
        return 1
    except Exception as error:
        finish_answer()
        channel.send(_fatal(error))
        return 1
    return 0


def _fatal(error: Exception) -> Fatal:
    """The message to the frontend about a failure that has no message for users."""
    if (cause := what_ran_out(error)) is not None:
        log.error("the engine failed: %s", cause)
        return Fatal(ResourceError.code, f"The engine does not fit: {cause}")
    log.exception("the engine failed", exc_info=error)
    return Fatal("internal_error", f"{type(error).__name__} in the engine; see its log.")


def _read_options(sock: socket.socket) -> tuple[EngineOptions, threading.Thread | None]:
    """Read the options from the socket. Requests to validate a model may come before the options,
    and are answered. `Stop` or a long silence raises `ConnectionClosedError`.

    The options may follow such a request at once. They are returned when the validator has checked
    what an engine process reads. The validation goes on meanwhile, and the thread that is returned
    too will answer the request. Nothing may be sent before that thread has ended.
    """
    channel: SocketChannel[EngineOptions | Validate | Stop] = SocketChannel(
        sock, EngineOptions | Validate | Stop
    )
    answering: threading.Thread | None = None
    is_refused = False
    deadline = time.monotonic() + OPTIONS_TIMEOUT_S
    while time.monotonic() < deadline:
        for message in channel.poll(1.0):
            if isinstance(message, Stop) or (is_refused and isinstance(message, EngineOptions)):
                raise ConnectionClosedError("stopped before it had started")
            if isinstance(message, EngineOptions):
                return message, answering
            if answering is not None:
                answering.join()  # a process that forks must have one thread
            fork = Fork(message.validator, Path(message.path), message.max_cpu_s)
            if fork.wait_until_passed():
                answering = threading.Thread(target=_answer, args=(fork, channel), daemon=True)
                answering.start()
            else:
                is_refused = _answer(fork, channel) != 0
            deadline = time.monotonic() + OPTIONS_TIMEOUT_S
    raise ConnectionClosedError("the frontend sent no options")


def _answer(fork: Fork, channel: SocketChannel[Any]) -> int:
    """Tell the frontend how a validation ended. Returns its exit status."""
    status, output = fork.finish()
    with contextlib.suppress(ConnectionClosedError):  # the next poll reports that
        channel.send(Validated(status, output))
    return status


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
