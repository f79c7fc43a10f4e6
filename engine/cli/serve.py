"""`engine serve`: a model behind an OpenAI-compatible API, until a signal ends it."""

from pathlib import Path
from typing import Annotated

import typer

from engine.cli.console import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    load_cli_settings,
    messages,
)


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
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; or set LLM_ENGINE_API_KEY.")
    ] = None,
    insecure_no_auth: Annotated[
        bool | None, typer.Option("--insecure-no-auth", help="Serve other machines without a key.")
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
        "performance.batch_size": batch_size,
        "performance.memory_pool_size_mb": memory_pool_size_mb,
        "performance.threads": threads,
        "cache.enabled": cache,
        "logging.level": log_level,
        "logging.format": log_format,
    }
    settings = load_cli_settings(config, flags).settings

    from engine.backends.custom.app import build_server
    from engine.core.observability.logging import setup_logging
    from engine.servers.run import address_of, bind_socket, run_server

    setup_logging(settings.logging.level, settings.logging.format)
    sock = bind_socket(settings)
    server = build_server(settings)
    url = address_of(sock)
    note = messages()
    note.print(f"Loading [bold]{server.model_id}[/] ...", highlight=False)

    def announce(seconds: float) -> None:
        note.print(f"Ready in {seconds:.1f} s at [bold]{url}/v1[/]", highlight=False)
        note.print(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{server.model_id}", "messages": '
            f'[{{"role": "user", "content": "Hello!"}}]}}\'',
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    run_server(server.app, sock, announce)
