"""`TransformersBackend`: a Hugging Face Transformers model behind our frontend and engine loop.

Nothing here imports Transformers or PyTorch. The engine process loads them, or its thread when it
runs in this process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from engine.backends.base import BackendConfig
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.frontend.text_model import TextModel
from engine.backends.custom.ipc.engine_process import EngineProcess
from engine.backends.custom.options import EngineOptions
from engine.backends.transformers.checkpoint import read_text
from engine.core.errors import ConfigError

FRAMEWORK = "transformers"


@dataclass(frozen=True)
class TransformersConfig(BackendConfig):
    """`model_name` is a folder with safetensors, or a GGUF file. `attention` "own" computes each
    sequence alone with the model's own cache; "paged" requires batched attention; "auto" uses it if
    the model allows. `in_process` runs the engine in a thread here, instead of a child process that
    can crash safely. `backend_args` are the remaining `EngineOptions` by name.
    """

    device: str = "auto"  # cpu, cuda, cuda:1
    dtype: str = "auto"  # float32, bfloat16, float16
    attention: str = "auto"
    max_seq_len: int | None = None  # None means the model's own limit
    max_slots: int = 64  # max concurrent sequences
    threads: int | None = None
    in_process: bool = False


class TransformersBackend(CustomBackend):
    """Any causal language model of Transformers. Code that comes with a checkpoint is never run."""

    config_type: ClassVar[type[BackendConfig]] = TransformersConfig
    framework = FRAMEWORK
    worker_module = "engine.backends.transformers.worker"
    examiner = "engine.backends.transformers.checkpoint:examine_checkpoint"

    def __init__(
        self,
        model: str | BackendConfig,
        *,
        options: EngineOptions | None = None,
        served_name: str | None = None,
        in_process: bool = False,
        process: EngineProcess | None = None,
    ) -> None:
        if process is not None:
            process.discard()  # it is a prestarted worker of our own frameworks
        config = model if isinstance(model, BackendConfig) else TransformersConfig(model)
        if isinstance(config, TransformersConfig):
            options = options or _options(config)
            in_process = in_process or config.in_process
        super().__init__(config, options=options, served_name=served_name, in_process=in_process)

    @staticmethod
    def read_text(path: Path) -> TextModel:
        return read_text(path)


def _options(config: TransformersConfig) -> EngineOptions:
    named = {
        name: getattr(config, name)
        for name in ("device", "dtype", "attention", "max_seq_len", "max_slots", "threads")
    }
    for name in config.backend_args:
        if name in named or name not in EngineOptions.__struct_fields__:
            known = sorted(set(EngineOptions.__struct_fields__) - named.keys())
            raise ConfigError(
                f"'{name}' is not one of transformers' backend_args: {', '.join(known)}", param=name
            )
    fields = {"model_path": config.model_name, "framework": FRAMEWORK}
    try:
        return msgspec.convert({**fields, **named, **config.backend_args}, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend 'transformers': {error}") from None
