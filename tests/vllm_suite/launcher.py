"""Stands in for vLLM's `tests/utils.py`: its servers are ours, with the default model.

Each server has the model name that its test asks for. Flags that change an answer are translated.
All others, such as those about the GPU, are dropped. This file runs in the suite's environment,
which has neither vLLM nor our packages.
"""

import os
import socket
import subprocess
import time
from typing import Any

import httpx
import openai

ENGINE = os.environ["VLLM_SUITE_ENGINE"]  # the program `engine`
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SAME_FLAGS = ("--port", "--max-num-seqs", "--max-num-batched-tokens")
ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = os.getcwd()
# Flags of vLLM's server, and the settings of ours that they are. The value is that of the flag, or
# 1 for a flag without a value.
SETTINGS = {
    "--root-path": "LLM_ENGINE_SERVER__ROOT_PATH",
    "--max-logprobs": "LLM_ENGINE_SERVER__MAX_LOGPROBS",
    "--shutdown-timeout": "LLM_ENGINE_SERVER__DRAIN_TIMEOUT_S",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def values(flags: list[str], name: str) -> str | None:
    """The value of a flag; None if it is not given."""
    if name not in flags:
        return None
    following = flags[flags.index(name) + 1 :]
    return following[0] if following and not following[0].startswith("--") else "1"


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        auto_port: bool = True,
        **unused: Any,
    ) -> None:
        flags = [part for each in vllm_serve_args for part in each.split("=", 1)]
        flags = [each.replace("_", "-") if each.startswith("--") else each for each in flags]
        if auto_port:
            flags += ["--port", str(free_port())]
        self.host = "127.0.0.1"
        self.port = int(values(flags, "--port") or 0)
        command = [ENGINE, "serve", "--served-model-name", model, "--log-level", "warning"]
        for name in SAME_FLAGS:
            if (value := values(flags, name)) is not None:
                command += [name, value]
        # The model's own context is shorter than that of some tests' models.
        length = min(int(values(flags, "--max-model-len") or 8192), 8192)
        command += ["--max-model-len", str(length)]
        if "--no-enable-prefix-caching" in flags:
            command.append("--no-enable-prefix-caching")
        self.proc = subprocess.Popen(command, env=self._environment(flags, env_dict or {}))
        self._wait()

    def _environment(self, flags: list[str], given: dict[str, str]) -> dict[str, str]:
        environment = dict(os.environ)
        key = given.get("VLLM_API_KEY") or values(flags, "--api-key")
        if key is not None:
            environment["LLM_ENGINE_API_KEY"] = key
        for flag, setting in SETTINGS.items():
            if (value := values(flags, flag)) is not None:
                environment[setting] = value
        return environment

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.proc.poll() is not None:
                raise RuntimeError(f"The server ended with status {self.proc.returncode}.")
            try:
                if httpx.get(self.url_for("health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.proc.kill()
        raise TimeoutError("The server did not become ready.")

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            "base_url": self.url_for("v1"),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
        }
        return defaults | given
