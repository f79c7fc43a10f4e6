"""`VLLMBackend`: runs vLLM as a child process behind the `InferenceBackend` interface."""

import dataclasses
from typing import ClassVar

from engine.backends.base import BackendConfig
from engine.backends.external.listening import HeldPort, Place, PrivateSocket
from engine.backends.external.served_child import ServedBackend
from engine.backends.openai import OpenAIConfig
from engine.backends.vllm.config import VLLMConfig


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
