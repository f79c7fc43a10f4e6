"""`engine serve`: serves a model over an OpenAI-compatible API until a signal ends it."""

import contextlib
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import BEGAN_AT
from engine.cli.console import ConfigOption, ModelArgument, load_cli_settings
from engine.cli.main import take_engine
from engine.cli.serve_options import (
    PRESET_FLAGS,
    PRESET_PREFIX,
    SERVE_FLAGS,
    ApiKeyOption,
    HubOption,
    LoraOption,
    ModelOption,
    OptionsOption,
    with_flags,
)
from engine.core import faults
from engine.core.sandbox.processes import keep_all

if TYPE_CHECKING:
    from socket import socket

    from engine.backends.custom.app import Server
    from engine.core.config import LoadedSettings
    from engine.core.config_schema import Settings
    from engine.core.sandbox.checkpoint_validation import Validation
    from engine.ipc.engine_process import EngineProcess


def parse_options(given: list[str] | None) -> dict[str, Any] | None:
    """Parse `name=value` options. Values are in TOML syntax; a value that is not valid TOML is
    taken as text.
    """
    if not given:
        return None
    from engine.backends.factory import option_value
    from engine.core.errors import ConfigError

    options: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {each}: write it as NAME=VALUE")
        options[name] = option_value(text)
    return options


def parse_adapters(given: list[str] | None) -> dict[str, str] | None:
    """Parse `NAME=PATH`, a path alone as llama.cpp takes it, or vLLM's JSON. An adapter without a
    name has the name of its file or folder. An adapter of an address is downloaded first.
    """
    if not given:
        return None
    from engine.core.errors import ConfigError
    from engine.core.store.adapter_store import is_address

    adapters = {}
    for each in given:
        name, equals, path = each.partition("=")
        if each.startswith("{"):
            try:
                told = json.loads(each)
                name, path = told["name"], told["path"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"--lora {each}: write it as NAME=PATH") from None
        elif not equals or is_address(each):
            name, path = Path(each).stem, each
        local = _downloaded_adapter(path) if is_address(path) else Path(path).expanduser()
        adapters[name] = str(local.absolute())
    return adapters


def _downloaded_adapter(address: str) -> Path:
    from engine.cli.console import messages
    from engine.cli.pull_progress import TerminalProgress
    from engine.core.store.pull import cached_adapter

    with TerminalProgress(messages()) as progress:
        return cached_adapter(address, progress)


@with_flags((*SERVE_FLAGS, *PRESET_FLAGS))
def serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    hf_repo: HubOption = None,
    option: OptionsOption = None,
    lora: LoraOption = None,
    api_key: ApiKeyOption = None,
    config: ConfigOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    flags |= {
        "model.model_path": _one_model(model, model_option, hf_repo),
        "model.options": parse_options(option),
        "model.adapters": parse_adapters(lora),
    }
    if api_key is not None:
        # A secret may come from the environment, but not from flags.
        os.environ["LLM_ENGINE_API_KEY"] = api_key
        print("--api-key: other users can see it; prefer --api-key-file", file=sys.stderr)
    preset = {key.removeprefix(PRESET_PREFIX): flags.pop(key) for key in PRESET_FLAGS}
    if preset["max_tokens"] == -1:
        preset["max_tokens"] = None
    _serve(config, flags, {key: each for key, each in preset.items() if each is not None})


def _one_model(*given: str | None) -> str | None:
    named = [each for each in given if each is not None]
    if len(named) > 1:
        from engine.core.errors import ConfigError

        raise ConfigError(f"name one model, not {' and '.join(named)}", param="model.model_path")
    return named[0] if named else None


def _loaded(config: Path | None, flags: dict[str, Any], preset: dict[str, Any]) -> "LoadedSettings":
    """The settings, with these values in the preset of the served model."""
    loaded = load_cli_settings(config, flags)
    if not preset:
        return loaded
    from engine.core.config_tables import with_preset
    from engine.core.store.model_store import default_name

    model = loaded.settings.model
    name = model.name or default_name(model.model_path)
    return replace(loaded, settings=with_preset(loaded.settings, name, preset))


def _serve(config: Path | None, flags: dict[str, Any], preset: dict[str, Any]) -> None:
    # Start the engine process first, so that it imports its modules in parallel with this process.
    process = take_engine()
    gc.disable()  # off until the server is ready, because startup creates hardly any garbage
    try:
        from engine.core.config import check_references
        from engine.core.listening import bind_probes, bind_socket

        faults.arm()
        loaded = _loaded(config, flags, preset)
        check_references(loaded.settings)
        _check_role(loaded.settings)
        fetch_missing(loaded.settings)
        sock, probe_sock = bind_socket(loaded.settings), bind_probes(loaded.settings)

        def reread() -> "Settings":
            return _loaded(config, flags, preset).settings

        if loaded.settings.tables.backends:
            process.discard()  # with several backends, each one starts its own engine process
            origin = _check_no_model(loaded)
            _run(loaded, sock, probe_sock, lambda: _routed_server(loaded, origin, reread))
        else:
            begin_engine(loaded.settings, process, _import_server)
            _run(loaded, sock, probe_sock, lambda: _server(loaded.settings, process, reread))
    except BaseException:
        process.discard()
        raise
    finally:
        gc.enable()


def _check_role(settings: "Settings") -> None:
    """Refuses the role prefill: the engine of a server can only use the work of prefill nodes."""
    if settings.nodes.role == "prefill":
        from engine.core.errors import ConfigError

        raise ConfigError(
            "the engine of a server can't have the role prefill; start the server with the role"
            " decode or both, and prefill nodes by `engine node join URL --role prefill`",
            param="nodes.role",
        )


def fetch_missing(settings: "Settings") -> None:
    """Download the models of our own engines that are not on this machine yet."""
    from engine.backends.custom.engine_settings import backend_name, has_engine
    from engine.core.store.model_store import needs_pull

    backends = settings.tables.backends.values()
    models = {each.model for each in backends if has_engine(each.kind)}
    if not backends and has_engine(backend_name(settings)):
        named = (settings.model.model_path, settings.model.draft_model)
        models = {each for each in named if each is not None}
    for model in sorted(models):
        if needs_pull(model):
            from engine.cli.pull_progress import pull_shown

            pull_shown(model)


def begin_engine(
    settings: "Settings", process: "EngineProcess", meanwhile: Callable[[], None]
) -> None:
    """Send the engine process its options, so that it loads the model while this process imports
    the server. If the model file was not validated before, wait for its validation, and do
    something else `meanwhile`.
    """
    from engine.backends.custom.engine_settings import (
        VALIDATOR,
        backend_name,
        engine_options,
        has_engine,
    )
    from engine.core.sandbox.checkpoint_validation import Validation, validate
    from engine.core.store.model_store import resolve_model

    name = backend_name(settings)
    if not has_engine(name):
        return
    path = resolve_model(settings.model.model_path)
    validation = Validation(path, VALIDATOR, process.validate)
    if (draft := settings.model.draft_model) is not None:
        validate(resolve_model(draft), VALIDATOR)
    # An engine process that validates the model loads it once the validator has passed what the
    # engine process itself reads.
    process.begin(engine_options(settings, name, path))
    if validation.is_under_way:
        with ThreadPoolExecutor(1) as waiting:
            finished = waiting.submit(_keep_validated, path, validation)
            meanwhile()
            finished.result()


def _keep_validated(path: Path, validation: "Validation") -> None:
    from engine.frontend.text_cache import keep_text
    from engine.ipc.transport import ConnectionClosedError

    # If the engine process has ended, the code that uses it later will report that.
    with contextlib.suppress(ConnectionClosedError):
        if found := validation.finish():
            keep_text(path, found)


def _import_server() -> None:
    """Import the server's modules, and prepare its first request. This is called while the engine
    process validates the model file, for which the server must wait.
    """
    import engine.backends.custom.app  # noqa: F401
    from engine.servers.run import prepare_first_request

    prepare_first_request()


def _check_no_model(loaded: "LoadedSettings") -> str:
    """Return the path of the configuration file that lists the backends. Raises `ConfigError` if
    flags or settings also name a single model.
    """
    from engine.core.errors import ConfigError

    origin = loaded.origins[f"backends.{next(iter(loaded.settings.tables.backends))}"]
    names = ("model_path", "backend", "name", "options", "adapters", "draft_model")
    for key in (f"model.{name}" for name in names):
        if loaded.origins[key] != "default":
            raise ConfigError(
                f"{key} ({loaded.origins[key]}): {origin} has [backends.*], which say what is"
                " served; leave one of the two out",
                param=key,
            )
    return origin


def _server(
    settings: "Settings", process: "EngineProcess", reread: "Callable[[], Settings]"
) -> "Server":
    from engine.backends.custom.app import build_server

    return build_server(settings, process, reread)


def _routed_server(
    loaded: "LoadedSettings", origin: str, reread: "Callable[[], Settings]"
) -> "Server":
    from engine.backends.custom.app import build_routed_server

    return build_routed_server(loaded.settings, origin, reread)


def _run(
    loaded: "LoadedSettings",
    sock: "socket",
    probe_sock: "socket | None",
    build: "Callable[[], Server]",
) -> None:
    from engine.core.listening import address_of, is_on_all_interfaces
    from engine.core.observability.logging import setup_logging
    from engine.servers.run import run_server

    settings = loaded.settings
    setup_logging(settings.logging.level, settings.logging.format)
    server = build()
    url = address_of(sock)
    if settings.server.tls_files is not None:
        url = url.replace("http://", "https://", 1)
    where = ", on all interfaces" if is_on_all_interfaces(sock) else ""
    say = speaker(settings.logging.format)
    _tell_of_unused(loaded)
    say(f"Loading {server.loading} ...")

    def announce(_: float) -> None:
        keep_all()
        # The time is counted from the start of the command, because most of the loading happens
        # before the server starts.
        say(f"Ready in {time.monotonic() - BEGAN_AT:.1f} s at {url}/v1{where}")
        if settings.logging.format == "pretty":
            needs_key = bool(settings.server.api_key or settings.server.keys_file)
            say(_first_request(url, *server.first_call(), needs_key))
            if settings.server.ui:
                say(f"  or open {url} in a browser")

    if probe_sock is not None:
        say(f"Probes at {address_of(probe_sock)}/livez, /readyz and /health")
    run_server(server.app, sock, announce, say, probe_sock)


def _tell_of_unused(loaded: "LoadedSettings") -> None:
    """Tell the user about settings that have no effect: presets of models that are not served, and
    settings of our own engine if another backend is used.
    """
    from engine.backends.custom.engine_settings import backend_name, has_engine
    from engine.core.store.model_store import default_name

    settings = loaded.settings
    log = logging.getLogger(__name__)
    if not settings.tables.backends:
        served = settings.model.name or default_name(settings.model.model_path)
        for name, preset in settings.tables.presets.items():
            if preset.model is None and name != served:
                log.warning("presets.%s is not used: the model's id is %s", name, served)
    kinds = [each.kind for each in settings.tables.backends.values()] or [backend_name(settings)]
    if any(has_engine(kind) for kind in kinds):
        return
    of_ours = ("cache.", "performance.", "model.d", "model.quantization", "model.max_")
    for key, origin in loaded.origins.items():
        if origin != "default" and key.startswith(of_ours):
            log.warning(
                "%s (%s) is for engines of our own and does nothing for %s", key, origin, kinds[0]
            )


def speaker(log_format: str) -> Callable[[str], None]:
    """A function that prints a message to the user, or logs it if the log format is JSON lines."""
    if log_format == "json":
        return logging.getLogger(__name__).info
    return lambda text: print(text, file=sys.stderr, flush=True)


def _first_request(url: str, path: str, body: dict[str, Any], needs_key: bool) -> str:
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"  curl {url}{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
