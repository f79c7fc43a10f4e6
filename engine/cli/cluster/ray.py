"""`engine cluster`: nodes in a Ray cluster, as many as the load needs."""

import json
import signal
import threading
from typing import Annotated

import typer

from engine.cli.cluster.node import CaOption, TokenOption, call_nodes
from engine.cli.console import JsonOption

app = typer.Typer(
    help="Run nodes in a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
RayOption = Annotated[
    str, typer.Option("--ray", metavar="ADDRESS", help="The Ray cluster: HOST:PORT or auto.")
]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server that the nodes join.")],
    ray: RayOption,
    token_file: TokenOption,
    ca_file: CaOption = None,
    min_nodes: Annotated[int, typer.Option(min=0, help="Never fewer nodes than this.")] = 0,
    max_nodes: Annotated[int, typer.Option(min=1, help="Never more nodes than this.")] = 1,
    per_node: Annotated[
        int, typer.Option(min=1, help="Open requests for which one node is enough.")
    ] = 16,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0, help="Seconds of low load before a node leaves.")
    ] = 60.0,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs of each node.")] = 1.0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each node.")] = 0.0,
) -> None:
    """Keep as many nodes in a Ray cluster as the server's queue needs. Options that are not listed
    here are those of `engine node join`. Ctrl-C ends the scaling; the nodes stay.
    """
    from engine.core.observability.logging import setup_logging
    from engine.routing.nodes.dial import read_token
    from engine.routing.nodes.ray_launcher import (
        Autoscaler,
        NodePlan,
        RayNodes,
        connect,
        keep_scaled,
    )

    setup_logging("info", "pretty")
    joined = (url, *ctx.args) if ca_file is None else (url, "--ca-file", str(ca_file), *ctx.args)
    plan = NodePlan(read_token(token_file), joined, num_cpus, num_gpus)
    call_nodes(url, token_file, ca_file, "GET", "")  # raises if the server takes no nodes
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: stopped.set())

    def count_open() -> int:
        return int(call_nodes(url, token_file, ca_file, "GET", "")["open_requests"])

    scaler = Autoscaler(min_nodes, max_nodes, per_node, patience_s)
    keep_scaled(RayNodes(connect(ray), plan), scaler, count_open, stopped.is_set)


@app.command()
def status(ray: RayOption, as_json: JsonOption = False) -> None:
    """List the nodes that run in a Ray cluster."""
    from engine.routing.nodes.ray_launcher import NodePlan, RayNodes, connect

    names = RayNodes(connect(ray), NodePlan("", ())).names()
    print(json.dumps(names) if as_json else "\n".join(names) or "no nodes")


@app.command()
def down(ray: RayOption) -> None:
    """Let all nodes in a Ray cluster leave. Their open requests finish first."""
    from engine.routing.nodes.ray_launcher import NodePlan, RayNodes, connect

    nodes = RayNodes(connect(ray), NodePlan("", ()))
    count = len(nodes.names())
    nodes.scale_to(0)
    print(f"{count} nodes left")
