"""The engine process of a Transformers model, with our engine loop."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.backends.transformers.checkpoint import open_checkpoint, read_text
from engine.core.errors import ConfigError
from engine.core.sandbox.liveness import Pulse
from engine.ipc.options import EngineOptions
from engine.ipc.transport import Channel
from engine.runtime.requests.grammar import Grammars
from engine.worker import main as worker


def run_engine(
    options: EngineOptions,
    channel: Channel,
    pulse: Pulse,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Load the model, report that it is ready, and serve requests. Returns when told to stop.
    Raises fatal errors.
    """
    started_at = time.monotonic()
    path = Path(options.model_path)
    checkpoint = open_checkpoint(path)
    _refuse(options)
    try:
        import torch

        from engine.backends.transformers.fitting import ModelToFit, fit
        from engine.backends.transformers.loading import load_model
        from engine.torch.execution import build
    except ImportError as error:
        raise ConfigError(
            f"the transformers backend needs PyTorch and Transformers ({error}): "
            "pip install 'engine[torch,transformers]'"
        ) from error

    grammars = Grammars(lambda: read_text(path).vocabulary())
    grammars.prepare()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = build.find_device(options.device, options.dtype)
    options = options.planned(device.name, device.free_bytes, os.cpu_count() or 1)
    model = load_model(checkpoint, build.torch_device(device.name), build.torch_dtype(device.dtype))
    fitted = fit(ModelToFit(model, checkpoint.shape, options, device))
    if not fitted.shares:
        options = msgspec.structs.replace(options, cache_enabled=False)
    worker.serve_runner(
        (fitted.runner, fitted.config, fitted.plan),
        options,
        channel,
        pulse,
        on_loaded,
        started_at,
        grammars,
    )


def _refuse(options: EngineOptions) -> None:
    """Refuse options of our own frameworks that Transformers has no equivalent for."""
    usual = EngineOptions(model_path="", framework="")
    for name in ("quantization", "kv_dtype", "affinity", "numerics"):
        given = getattr(options, name)
        if given != getattr(usual, name):
            raise ConfigError(
                f"the transformers backend has no {name} '{given}'; leave it out", param=name
            )


def main(socket_fd: int, heartbeat_fd: int, parent_pid: int) -> int:
    # All files are local, so forbid downloads. Also switch off progress bars.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    return worker.main(socket_fd, heartbeat_fd, parent_pid, run=run_engine)


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:4]))
    logging.shutdown()
    # Exit without Python's normal teardown. It would only make libraries print warnings about
    # objects that still exist.
    os._exit(status)
