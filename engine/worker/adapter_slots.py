"""Makes the slots of LoRA adapters for an engine. Imported when the first adapter is used."""

from engine.adapters.reading import open_adapter
from engine.core.memory import memory_room
from engine.ipc.options import EngineOptions
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.model_runner import AdapterRunner
from engine.weights.model import ModelSource


def adapter_slots(
    runner: AdapterRunner, options: EngineOptions, source: ModelSource
) -> AdapterSlots:
    config, max_rank = source.config, options.max_adapter_rank
    return AdapterSlots(
        runner,
        lambda path: open_adapter(path, config, max_rank),
        options.max_adapters,
        min(options.adapter_bytes, memory_room().plannable // 4),
    )
