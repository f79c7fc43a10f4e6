"""An engine process that loads nothing: it makes a file beside its model, then says it is ready.

The file shows when the engine process began, and with which model.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from engine.core.interfaces.request import Ready
from engine.core.sandbox.liveness import Pulse
from engine.ipc.options import EngineOptions
from engine.ipc.transport import Channel
from engine.worker.main import main


def begun_file(model: Path) -> Path:
    return model.with_suffix(".begun")


def run(
    options: EngineOptions, channel: Channel, pulse: Pulse, on_loaded: Callable[[], None]
) -> None:
    begun_file(Path(options.model_path)).touch()
    on_loaded()
    channel.send(
        Ready(
            max_seq_len=1,
            num_blocks=1,
            block_size=1,
            max_slots=1,
            dtype="float32",
            device="cpu",
            load_s=0.0,
        )
    )


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4]), run=run))
