"""SGLang as a supervised child process, behind the `InferenceBackend` interface."""

from dataclasses import dataclass
from typing import ClassVar

from engine.backends.base import BackendConfig
from engine.backends.external.command_line import free_flags, option_flags
from engine.backends.external.listening import HeldPort, Place
from engine.backends.external.served_child import ServedBackend
from engine.backends.external.served_config import ServedConfig, port_flags

__all__ = ["SGLangBackend", "SGLangConfig"]

_OPTIONS = (
    *("tokenizer_path", "revision", "dtype", "quantization", "load_format", "kv_cache_dtype"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "device"),
    *("mem_fraction_static", "context_length", "max_running_requests", "chunked_prefill_size"),
    *("random_seed", "disable_radix_cache", "attention_backend", "chat_template"),
    *("tool_call_parser", "reasoning_parser", "trust_remote_code"),
)
_DECIDED_HERE = (
    *("model", "model_path", "served_model_name", "host", "port"),
    *("enable_cache_report", "log_level_http"),
)


@dataclass(frozen=True)
class SGLangConfig(ServedConfig):
    """Options of SGLang, under SGLang's names. None means SGLang's default. `backend_args` are
    other options of SGLang's launcher.
    """

    engine_name: ClassVar[str] = "SGLang"

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    mem_fraction_static: float | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str | None = None
    kv_cache_dtype: str | None = None
    tokenizer_path: str | None = None
    revision: str | None = None
    device: str | None = None
    attention_backend: str | None = None
    random_seed: int | None = None
    disable_radix_cache: bool = False
    chat_template: str | None = None

    @property
    def takes_gguf(self) -> bool:
        return True

    def argv(self, model: str | None = None, place: Place | None = None) -> list[str]:
        command = [self.interpreter(), "-m", "sglang.launch_server"]
        command.append(f"--model-path={model or self.model_name}")
        flags = [f"--served-model-name={self.model_id}", *option_flags(self, _OPTIONS)]
        # SGLang shall report cached tokens. It shall not log requests, because our log has them.
        flags += ["--enable-cache-report", "--log-level-http=warning"]
        flags += free_flags(self.backend_args, (*_OPTIONS, *_DECIDED_HERE))
        return [*command, *port_flags(self, place), *flags]


class SGLangBackend(ServedBackend):
    """SGLang's server as a child process. It can't listen on a Unix socket, so it always uses a
    port.
    """

    config_type: ClassVar[type[BackendConfig]] = SGLangConfig
    dialect = "sglang"
    module = "sglang"

    def _listen(self) -> Place:
        return HeldPort(self._config.host, self._config.port)
