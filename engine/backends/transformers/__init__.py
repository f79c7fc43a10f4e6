"""A backend that computes with Hugging Face Transformers, behind our frontend and engine loop. It
supports all causal language models of Transformers.

This module does not import Transformers or PyTorch. The engine process imports them, or the
engine's thread if the engine runs in this process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from engine.backends.base import BackendConfig
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.transformers.checkpoint import read_text
from engine.core.errors import ConfigError
from engine.frontend.text_model import TextModel
from engine.ipc.engine_process import EngineProcess
from engine.ipc.options import EngineOptions

__all__ = ["TransformersBackend", "TransformersConfig"]

FRAMEWORK = "transformers"


@dataclass(frozen=True)
class TransformersConfig(BackendConfig):
    """Configuration of the Transformers backend.

    `model_name` is a folder with safetensors, or a GGUF file. `attention` is "own", "paged" or
    "auto". "own" computes each sequence alone, with the model's own cache. "paged" computes
    sequences in batches, with a paged KV cache. "auto" means "paged" if the model allows it, else
    "own". `in_process` runs the engine in a thread of this process. Otherwise it runs in a child
    process, whose crash does not end the server. `backend_args` are other `EngineOptions`.
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
    validator = "engine.backends.transformers.checkpoint:validate_checkpoint"

    def __init__(
        self,
        model: str | BackendConfig,
        *,
        options: EngineOptions | None = None,
        served_name: str | None = None,
        chat_template: str | None = None,
        in_process: bool = False,
        process: EngineProcess | None = None,
    ) -> None:
        if process is not None:
            process.discard()  # this process was started early for our own frameworks
        config = model if isinstance(model, BackendConfig) else TransformersConfig(model)
        if isinstance(config, TransformersConfig):
            options = options or _options(config)
            in_process = in_process or config.in_process
        super().__init__(
            config,
            options=options,
            served_name=served_name,
            chat_template=chat_template,
            in_process=in_process,
        )

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
