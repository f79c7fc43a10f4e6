"""`engine serve`: a model behind an OpenAI-compatible API, until a signal ends it."""

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.backends.custom.runtime.engine_process import EngineProcess
from engine.cli.console import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    load_cli_settings,
)

if TYPE_CHECKING:
    from engine.core.config_schema import Settings


def serve(
    model: ModelArgument = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    name: Annotated[str | None, typer.Option(help="Model id that clients use.")] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(help="Context in tokens; default: the model's.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Most sequences computed in one step.")
    ] = None,
    memory_pool_size_mb: Annotated[
        int | None, typer.Option(help="KV cache in MiB; default: planned from free memory.")
    ] = None,
    cache: Annotated[
        bool | None, typer.Option("--cache/--no-cache", help="Share common prefixes.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the model.")] = None,
    affinity: Annotated[
        str | None, typer.Option(help="CPUs to bind the native threads to: auto, off or 0-3,8.")
    ] = None,
    numerics: Annotated[
        str | None,
        typer.Option(help="invariant: answers never depend on batch mates; fast: they may."),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Keys and values as auto, float32, bfloat16 or int8.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; or set LLM_ENGINE_API_KEY.")
    ] = None,
    insecure_no_auth: Annotated[
        bool | None, typer.Option("--insecure-no-auth", help="Serve other machines without a key.")
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Refuse what would be emulated or clamped, with 400."),
    ] = None,
    storage_path: Annotated[
        Path | None, typer.Option(help="Directory of stored responses, files and batches.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="pretty or json.")] = None,
    config: ConfigOption = None,
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    flags = {
        "model.model_path": model,
        "model.backend": backend,
        "model.device": device,
        "model.dtype": dtype,
        "model.name": name,
        "model.max_sequence_length": max_sequence_length,
        "server.host": host,
        "server.port": port,
        "server.api_key_file": api_key_file,
        "server.insecure_no_auth": insecure_no_auth,
        "server.strict": strict,
        "storage.path": storage_path,
        "performance.batch_size": batch_size,
        "performance.memory_pool_size_mb": memory_pool_size_mb,
        "performance.threads": threads,
        "performance.affinity": affinity,
        "performance.numerics": numerics,
        "cache.kv_dtype": kv_dtype,
        "cache.enabled": cache,
        "logging.level": log_level,
        "logging.format": log_format,
    }
    # numpy would start a BLAS thread for each core, here and in the engine: they only spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # until the server is ready: hardly anything that is made until then is garbage
    process = EngineProcess()  # it gets ready while this process does
    try:
        settings = load_cli_settings(config, flags).settings
        _begin(settings, process)
        _run(settings, process)
    except BaseException:
        process.discard()
        raise
    finally:
        gc.enable()


def _begin(settings: "Settings", process: EngineProcess) -> None:
    """Let the engine load, before the modules of this process are."""
    from engine.backends.custom.engine_settings import backend_name, engine_options, has_engine
    from engine.core.utils.model_store import resolve_model

    name = backend_name(settings)
    if has_engine(name):
        path = resolve_model(settings.model.model_path)
        process.begin(engine_options(settings, name, path))


def _run(settings: "Settings", process: EngineProcess) -> None:
    from engine.backends.custom.app import build_server
    from engine.core.observability.logging import setup_logging
    from engine.servers.run import address_of, bind_socket, run_server

    setup_logging(settings.logging.level, settings.logging.format)
    sock = bind_socket(settings)
    server = build_server(settings, process)
    url = address_of(sock)
    say = _speaker(settings.logging.format)
    say(f"Loading {server.model_id} ...")

    def announce(seconds: float) -> None:
        gc.freeze()  # what is there now stays, and need not be looked at again
        gc.enable()
        say(f"Ready in {seconds:.1f} s at {url}/v1")
        if settings.logging.format == "pretty":
            say(_first_request(url, server.model_id, settings.server.api_key is not None))

    run_server(server.app, sock, announce)


def _speaker(log_format: str) -> Callable[[str], None]:
    """Tells the user something; where the log is JSON lines, as one of those."""
    if log_format == "json":
        return logging.getLogger(__name__).info
    return lambda text: print(text, file=sys.stderr, flush=True)


def _first_request(url: str, model_id: str, needs_key: bool) -> str:
    body = {"model": model_id, "messages": [{"role": "user", "content": "Hello!"}]}
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )
