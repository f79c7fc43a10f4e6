"""Makes the places of LoRA adapters for an engine. Imported when the first adapter is used."""

from engine.backends.custom.adapters.reading import open_adapter
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.groups.adapter_places import AdapterPlaces
from engine.backends.custom.runtime.model_runner import AdapterRunner
from engine.backends.custom.runtime.scheduler import Scheduler
from engine.backends.custom.weights.model import ModelSource
from engine.core.memory import memory_room


def adapter_places(
    runner: AdapterRunner, options: EngineOptions, scheduler: Scheduler, source: ModelSource
) -> AdapterPlaces:
    config, max_rank = source.config, options.max_adapter_rank
    return AdapterPlaces(
        runner,
        lambda path: open_adapter(path, config, max_rank),
        lambda: {seq.adapter for seq in scheduler.sequences()},
        options.max_adapters,
        min(options.adapter_bytes, memory_room().plannable // 4),
    )
