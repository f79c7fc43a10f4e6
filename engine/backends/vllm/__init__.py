"""vLLM as a supervised child process, behind the `InferenceBackend` interface."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from engine.backends.base import BackendConfig
from engine.backends.external.command_line import free_flags, option_flags
from engine.backends.external.listening import SOME_SOCKET, HeldPort, Place, PrivateSocket
from engine.backends.external.served_child import ServedBackend
from engine.backends.external.served_config import ServedConfig, port_flags
from engine.backends.openai.config import OpenAIConfig, read_key

__all__ = ["VLLMBackend", "VLLMConfig"]

_OPTIONS = (
    *("tokenizer", "revision", "dtype", "quantization", "load_format", "kv_cache_dtype"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("seed", "enable_prefix_caching", "enforce_eager", "chat_template"),
    *("tool_call_parser", "reasoning_parser", "trust_remote_code"),
)
_DECIDED_HERE = (
    *("model", "served_model_name", "host", "port", "uds"),
    *("enable_auto_tool_choice", "enable_prompt_tokens_details", "disable_uvicorn_access_log"),
)


@dataclass(frozen=True)
class VLLMConfig(ServedConfig):
    """Options of vLLM, under vLLM's names. None means vLLM's default. `backend_args` are other
    options of `vllm serve`.
    """

    engine_name: ClassVar[str] = "vLLM"

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str | None = None
    kv_cache_dtype: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    seed: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    chat_template: str | None = None
    # Environment variable or file with the API key of the vLLM server. If the server listens on a
    # TCP port, its clients must send this key.
    api_key_env: str | None = None
    api_key_file: str | None = None

    @property
    def api_key(self) -> str | None:
        return read_key(OpenAIConfig(api_key_env=self.api_key_env, api_key_file=self.api_key_file))

    @property
    def takes_gguf(self) -> bool:
        """Whether `load_format` is "gguf". Only some versions of vLLM can load GGUF files."""
        return self.load_format == "gguf"

    def argv(self, model: str | None = None, place: Place | None = None) -> list[str]:
        command = [self.interpreter(), "-m", "vllm.entrypoints.cli.main", "serve"]
        flags = [f"--served-model-name={self.model_id}", *option_flags(self, _OPTIONS)]
        if self.tool_call_parser is not None:
            flags.append("--enable-auto-tool-choice")
        # vLLM shall report cached tokens. It shall not log requests, because our log has them.
        flags += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        flags += free_flags(self.backend_args, (*_OPTIONS, *_DECIDED_HERE))
        if self.port == 0:
            listen = [f"--uds={place.path if isinstance(place, PrivateSocket) else SOME_SOCKET}"]
        else:
            listen = port_flags(self, place)
        return [*command, model or self.model_name, *listen, *flags]

    def environment(self) -> dict[str, str]:
        key = self.api_key
        keys = {"VLLM_API_KEY": key} if key is not None else {}
        return {"VLLM_NO_USAGE_STATS": "1"} | super().environment() | keys


class VLLMBackend(ServedBackend):
    """`vllm serve` as a child process. If the port is 0, it listens on a Unix socket that only this
    user can reach.
    """

    config_type: ClassVar[type[BackendConfig]] = VLLMConfig
    dialect = "vllm"
    module = "vllm"

    def _client_config(self, place: Place) -> OpenAIConfig:
        config = self._config
        assert isinstance(config, VLLMConfig)
        return dataclasses.replace(
            super()._client_config(place),
            api_key_env=config.api_key_env,
            api_key_file=config.api_key_file,
        )

    def _listen(self) -> Place:
        if self._config.port == 0:
            return PrivateSocket()
        return HeldPort(self._config.host, self._config.port)
