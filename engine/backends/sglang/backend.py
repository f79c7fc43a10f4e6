"""`SGLangBackend`: runs SGLang as a child process behind the `InferenceBackend` interface."""

from typing import ClassVar

from engine.backends.base import BackendConfig
from engine.backends.external.listening import HeldPort, Place
from engine.backends.external.served_child import ServedBackend
from engine.backends.sglang.config import SGLangConfig


class SGLangBackend(ServedBackend):
    """SGLang's server as a child process. It can't listen on a Unix socket, so it always uses a
    port.
    """

    config_type: ClassVar[type[BackendConfig]] = SGLangConfig
    dialect = "sglang"
    module = "sglang"

    def _listen(self) -> Place:
        return HeldPort(self._config.host, self._config.port)
