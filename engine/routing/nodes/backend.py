"""A server without an engine of its own: it prepares prompts, and its nodes compute.

While no node is here, requests wait for one, as long as `server.queue_timeout_s` allows.
"""

from typing import Any

from engine.adapters.served import ServedAdapters
from engine.backends.custom.base_custom import CustomBackend
from engine.core.interfaces.request import ControlReply, Ready
from engine.ipc.engine_process import EngineProcess
from engine.routing.nodes.pool import NodePool


class _NoAdapters:
    """Nodes lack the files of adapters."""

    async def load_adapter(self, path: str, timeout_s: float) -> ControlReply:
        message = "A server without an engine of its own serves no LoRA adapters."
        return ControlReply(0, False, message)


class NodesBackend(CustomBackend):
    """`--backend nodes`: the model's tokenizer and chat template, and a pool of nodes."""

    framework = "nodes"

    def __init__(self, *args: Any, process: EngineProcess | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if process is not None:
            process.discard()
        self._pool = NodePool(None, "", self._options.max_revivals)
        self._link = self._pool
        self._adapters = ServedAdapters(_NoAdapters())
        self.totals_survive_restarts = True

    async def start(self) -> str:
        address = await super().start()
        assert self._text is not None
        longest = self._text.config.max_position
        self._pool.expected = Ready(
            max_seq_len=min(longest, self._options.max_seq_len or longest),
            num_blocks=0,
            block_size=self._options.block_size,
            max_slots=self._options.max_slots,
            dtype="",
            device="",
            load_s=0.0,
        )
        return address
