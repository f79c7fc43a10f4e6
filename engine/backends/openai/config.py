"""Configuration of `OpenAIBackend`: the server's address, its dialect and its key.

The configuration names an environment variable or a file that has the key. So it contains no
secrets.
"""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from engine import __version__
from engine.backends.base import BackendConfig
from engine.core.errors import ConfigError

DialectName = Literal["auto", "openai", "engine", "vllm", "sglang", "llama-server", "ollama", "tgi"]
AUTO_MODEL = "auto"
_UNIX = "unix://"
_AUTHORIZATION = "authorization"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Only printable ASCII is accepted. A line break would allow header injection.
_HEADER_VALUE = re.compile(r"[ -~]*")
_SECRET_HEADERS = frozenset(
    {_AUTHORIZATION, "proxy-authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"}
)
_OWN_HEADERS = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding"}
)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class OpenAIConfig(BackendConfig):
    """Configuration of an OpenAI-compatible server. `host` and `port` are not used. `backend_args`
    are fields of this server's API, which are added to the body of every generation request.
    """

    model_name: str = AUTO_MODEL  # "auto" or "": the first model that the server lists
    base_url: str = ""  # http://host:port/v1, https://..., or unix:///path.sock
    dialect: DialectName = "auto"
    api_key_env: str | None = None  # name of the variable with the key
    api_key_file: str | None = None
    # Header for the key. Only in `Authorization`, "Bearer" precedes the key.
    api_key_header: str = _AUTHORIZATION
    headers: dict[str, str] = field(default_factory=dict)  # sent with every request
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0  # max time without a byte of the response
    start_timeout_s: float = 10.0  # max wait for a server that is still starting
    probe_interval_s: float | None = None  # None: the dialect's default
    # The following fields correct what the server reports wrongly or not at all.
    max_model_len: int | None = None
    capabilities: tuple[str, ...] | None = None
    lacks: tuple[str, ...] = ()  # unsupported parameters, in addition to those of the dialect
    template_options: tuple[str, ...] = ()  # `chat_template_kwargs` that the model's template reads


@dataclass(frozen=True)
class ServerAddress:
    """A parsed server address."""

    url: str
    host: str
    port: int
    prefix: str  # path prefix of the API, such as /v1
    unix_path: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def root(self) -> str:
        """The base path of routes that are not below `/v1`, such as `/health`."""
        return self.prefix.removesuffix("/v1")

    @property
    def host_header(self) -> str:
        if self.unix_path is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.tls is not None else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def is_exposed(self) -> bool:
        """Whether others could read the traffic, because it is plain HTTP to another machine."""
        return self.tls is None and self.unix_path is None and self.host not in _LOOPBACK


def parse_endpoint(base_url: str) -> ServerAddress:
    """Parse an address. If it is invalid, raises a `ConfigError` that explains the format."""
    if base_url.startswith(_UNIX):
        path = base_url.removeprefix(_UNIX)
        if not path.startswith("/") or "\0" in path:
            raise _bad_url("a socket's path is absolute, as in unix:///run/engine.sock")
        return ServerAddress(base_url, "localhost", 0, "/v1", unix_path=path)
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError:
        raise _bad_url("its port is not a number") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        rule = "it should be http://HOST:PORT/v1, https://HOST/v1 or unix:///PATH.sock"
        raise _bad_url(rule if base_url else f"it is missing; {rule}")
    if parts.username is not None or parts.password is not None:
        raise _bad_url("a key does not belong there; name it with api_key_env or api_key_file")
    if parts.query or parts.fragment:
        raise _bad_url("it should end with its path")
    if not (parts.path.isascii() and parts.path.isprintable()) or " " in parts.path:
        raise _bad_url("its path has characters that have to be written as %XX")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return ServerAddress(
        url=base_url.rstrip("/"),
        host=parts.hostname,
        port=port or (443 if tls is not None else 80),
        prefix=parts.path.rstrip("/") or "/v1",
        tls=tls,
    )


def request_headers(config: OpenAIConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Header lines for every request. They include the key, so they must not be logged."""
    lines = [f"User-Agent: engine/{__version__}"]
    for name, value in config.headers.items():
        if name.lower() in _SECRET_HEADERS:
            raise ConfigError(
                f"headers: {name} would be a secret in a configuration; name the variable or file"
                " that holds it with api_key_env or api_key_file (and api_key_header).",
                param="headers",
            )
        if name.lower() in _OWN_HEADERS or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"headers: {name!r} can't be set.", param="headers")
        if not _HEADER_VALUE.fullmatch(value):
            rule = "should be printable ASCII"
            raise ConfigError(f"headers: the value of {name} {rule}.", param="headers")
        lines.append(f"{name}: {value}")
    key = read_key(config, environ)
    if key is None:
        return lines
    if not _HEADER_NAME.fullmatch(config.api_key_header):
        raise ConfigError(
            f"api_key_header: {config.api_key_header!r} is no name of a header.",
            param="api_key_header",
        )
    is_bearer = config.api_key_header.lower() == _AUTHORIZATION
    return [*lines, f"{config.api_key_header}: {'Bearer ' if is_bearer else ''}{key}"]


def read_key(config: OpenAIConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key from the file or the variable. It is only sent to this server."""
    if config.api_key_env is not None and config.api_key_file is not None:
        raise ConfigError("api_key_env and api_key_file: set one of them.", param="api_key_file")
    if config.api_key_env is not None:
        where = f"api_key_env: the environment variable {config.api_key_env}"
        key = environ.get(config.api_key_env, "").strip()
    elif config.api_key_file is not None:
        where = f"api_key_file: {config.api_key_file}"
        try:
            key = Path(config.api_key_file).expanduser().read_text().strip()
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not text"
            raise ConfigError(f"{where} can't be read: {why}.", param="api_key_file") from None
    else:
        return None
    if not key or not _HEADER_VALUE.fullmatch(key):
        raise ConfigError(
            f"{where} {'holds no key' if not key else 'holds what can be no key'}.",
            param=where.partition(":")[0],
        )
    return key


def _bad_url(why: str) -> ConfigError:
    # The message does not have the address, because that may contain a key.
    return ConfigError(f"base_url: {why}.", param="base_url")
