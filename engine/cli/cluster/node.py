"""`engine node`: lets the engine of this machine work for a server elsewhere."""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import (
    ConfigOption,
    JsonOption,
    complete_model,
    load_cli_settings,
    output,
)
from engine.cli.help import GroupedCommand, VerbGroup
from engine.cli.main import take_engine
from engine.cli.serve_options import ENGINE_FLAGS, with_flags
from engine.core.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    UnavailableError,
)

if TYPE_CHECKING:
    from engine.core.config_schema import Settings
    from engine.ipc.engine_process import EngineProcess
    from engine.routing.nodes.agent import NodeAgent

TOKEN_BYTES = 32
_JOIN = "Node"

app = typer.Typer(
    cls=VerbGroup,
    help="Let the engine of this machine work for a server elsewhere.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
UrlsArgument = Annotated[
    list[str], typer.Argument(metavar="URL", help="The server, or several servers.")
]
UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="The server.")]
TokenOption = Annotated[
    Path,
    typer.Option(
        "--token-file",
        rich_help_panel=_JOIN,
        help="File with the server's node token (server.node_token_file).",
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        rich_help_panel=_JOIN,
        help="Certificates that sign the server's; default: those of this system.",
    ),
]


NodeModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        "--model-path",
        rich_help_panel=_JOIN,
        help="The model, with the same files as the server's.",
        autocompletion=complete_model,
    ),
]


@app.command(cls=GroupedCommand)
@with_flags(ENGINE_FLAGS)
def join(
    urls: UrlsArgument,
    token_file: TokenOption,
    node_name: Annotated[
        str | None,
        typer.Option("--name", rich_help_panel=_JOIN, help="Name of the node; default: host name."),
    ] = None,
    ca_file: CaOption = None,
    model: NodeModelOption = None,
    config: ConfigOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Load a model here, and take requests of a running server until a signal ends it. SIGTERM lets
    open requests finish.
    """
    process = take_engine()
    try:
        settings = load_cli_settings(config, flags | {"model.model_path": model}).settings
        agent_of = _agent(settings, process, urls, token_file, node_name, ca_file)
        run_node(settings, agent_of)
    except BaseException:
        process.discard()
        raise


@app.command(name="list")
def list_nodes(
    url: UrlArgument,
    token_file: TokenOption,
    ca_file: CaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the nodes of a server."""
    found = call_nodes(url, token_file, ca_file, "GET", "")
    if as_json:
        print(json.dumps(found["nodes"], indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    columns = {"name": "name", "address": "address", "state": "state", "role": "role"}
    columns |= {"device": "device", "in_flight": "open", "requests": "all"}
    table = Table(*columns.values(), "free KV", "joined", box=None)
    for node in found["nodes"]:
        cells = [str(node[each]) for each in columns]
        free = node["free_blocks"]
        cells.append("" if free is None else f"{free / max(1, node['blocks']):.0%}")
        cells.append(f"{node['joined_s']:.0f} s ago")
        table.add_row(*map(Text, cells))
    output().print(table)


@app.command()
def leave(
    url: UrlArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A node that `ls` lists.")],
    token_file: TokenOption,
    ca_file: CaOption = None,
) -> None:
    """Ask a node to leave a server when its open requests have ended."""
    call_nodes(url, token_file, ca_file, "DELETE", f"/{name}")
    print(f"{name} is leaving")


@app.command()
def token(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
) -> None:
    """Make a node token, which only you can read. Give it to the server and to its nodes."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConflictError(f"{path} is there already; remove it first.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    print(f"{path}: start the server with LLM_ENGINE_SERVER__NODE_TOKEN_FILE={path}")


def call_nodes(
    url: str, token_file: Path, ca_file: Path | None, method: str, path: str
) -> dict[str, Any]:
    """Call the server's routes for nodes. The node token is proved, and not sent."""
    import asyncio

    from engine.cli.ops.admin_client import call_with
    from engine.routing.nodes.dial import authorization, endpoint_of, read_token, takes_no_nodes

    endpoint = endpoint_of(url, read_token(token_file), ca_file)
    wanted = f"nodes{path}"
    try:
        proof = asyncio.run(authorization(endpoint, f"{method} {wanted}"))
    except (OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(
            f"Nothing answers at {url} ({reason}). Is the server running?"
        ) from None
    try:
        return call_with(url, proof, method, wanted, ca_file=ca_file)
    except AuthenticationError:
        raise AuthenticationError(
            f"The token in {token_file} is not the node token of {url}."
        ) from None
    except InvalidRequestError:
        if path or method != "GET":
            raise
        raise takes_no_nodes(url) from None


def _agent(
    settings: "Settings",
    process: "EngineProcess",
    urls: list[str],
    token_file: Path,
    name: str | None,
    ca_file: Path | None,
) -> "NodeAgent":
    import asyncio

    from engine.backends.custom.engine_settings import backend_name, engine_options, has_engine
    from engine.cli.serve import begin_engine, fetch_missing
    from engine.core.store.model_store import resolve_model
    from engine.routing.nodes.dial import check, endpoint_of, read_token
    from engine.routing.nodes.make import make_agent

    token = read_token(token_file)
    endpoints = [endpoint_of(url, token, ca_file) for url in urls]
    for each in endpoints:
        asyncio.run(check(each))  # before a model is downloaded and loaded
    kind = backend_name(settings)
    if not has_engine(kind):
        raise ConfigError(
            f"a node runs an engine of our own, not {kind}; choose another with --backend",
            param="model.backend",
        )
    fetch_missing(settings)
    begin_engine(settings, process, lambda: None)
    path = resolve_model(settings.model.model_path)
    options = engine_options(settings, kind, path)
    return make_agent(options, endpoints, process, name, _speaker(settings))


def _speaker(settings: "Settings") -> Any:
    from engine.cli.serve import speaker
    from engine.core.observability.logging import setup_logging

    setup_logging(settings.logging.level, settings.logging.format)
    return speaker(settings.logging.format)


def run_node(settings: "Settings", agent: "NodeAgent") -> None:
    """Run a node until a signal or a server ends it. A second signal ends it at once."""
    import asyncio
    import signal

    async def run() -> None:
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def on_signal() -> None:
            if agent.is_leaving:
                main.cancel()
            agent.leave()

        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, on_signal)
        await agent.run(settings.server.drain_timeout_s)

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        sys.exit(1)
