"""`engine cluster`: nodes in a Ray cluster, as many as the load needs."""

import json
import math
import signal
import threading
from typing import Annotated, Any

import typer

from engine.cli.cluster.node import CaOption, NodeModelOption, TokenOption, call_nodes
from engine.cli.console import JsonOption, output
from engine.cli.help import VerbGroup
from engine.cli.serve_options import with_flags

app = typer.Typer(
    cls=VerbGroup,
    help="Run nodes in a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
RayOption = Annotated[
    str, typer.Option("--ray", metavar="ADDRESS", help="The Ray cluster: HOST:PORT or auto.")
]
NamespaceOption = Annotated[
    str, typer.Option(help="Ray namespace of the nodes. Give each server one of its own.")
]


# The flags of a node that say how many ranks it has.
_SIZES = {"performance.tensor_parallel_size": "-tp", "performance.pipeline_parallel_size": "-pp"}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_flags(_SIZES)
def up(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server that the nodes join.")],
    ray: RayOption,
    token_file: TokenOption,
    ca_file: CaOption = None,
    namespace: NamespaceOption = "engine",
    min_nodes: Annotated[int, typer.Option(min=0, help="Never fewer nodes than this.")] = 0,
    max_nodes: Annotated[int, typer.Option(min=1, help="Never more nodes than this.")] = 1,
    per_node: Annotated[
        int, typer.Option(min=1, help="Open requests for which one node is enough.")
    ] = 16,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0, help="Seconds of low load before a node leaves.")
    ] = 60.0,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs of each rank of a node.")] = 1.0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each rank of a node.")] = 0.0,
    model: NodeModelOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Keep as many nodes in a Ray cluster as the server's queue needs. Options that are not listed
    here are those of `engine node join`. Ctrl-C ends the scaling; the nodes stay.
    """
    from engine.core.observability.logging import setup_logging
    from engine.routing.nodes.dial import read_token
    from engine.routing.ray_nodes.launcher import NodePlan, RayNodes, connect
    from engine.routing.ray_nodes.scaling import Autoscaler, Scaling

    setup_logging("info", "pretty")
    arguments = [url, *ctx.args]
    if ca_file is not None:
        arguments += ["--ca-file", str(ca_file)]
    for key, size in flags.items():
        arguments += [] if size is None else [_SIZES[key], str(size)]
    plan = NodePlan(
        token=read_token(token_file),
        arguments=tuple(arguments),
        model=model,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        num_ranks=math.prod(max(1, size or 1) for size in flags.values()),
    )

    def count_open() -> int:
        return int(call_nodes(url, token_file, ca_file, "GET", "")["open_requests"])

    count_open()  # raises if the server takes no nodes
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: stopped.set())
    nodes = RayNodes(connect(ray, namespace))
    scaler = Autoscaler(min_nodes, max_nodes, per_node, patience_s)
    Scaling(nodes, plan, scaler, count_open).run(stopped.wait)


@app.command()
def status(
    ray: RayOption, namespace: NamespaceOption = "engine", as_json: JsonOption = False
) -> None:
    """List the nodes in a Ray cluster, and why they fail if they do."""
    from engine.routing.ray_nodes.launcher import RayNodes, connect

    nodes = RayNodes(connect(ray, namespace)).describe()
    if as_json:
        print(json.dumps(nodes, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "state", "ranks", "machines", "failure")
    for node in nodes:
        machines = ", ".join(node["machines"])
        cells = (node["name"], node["state"], str(node["ranks"]), machines, node["failure"])
        table.add_row(*map(Text, cells))
    output().print(table)


@app.command()
def down(
    ray: RayOption,
    namespace: NamespaceOption = "engine",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds in which nodes must have left.")
    ] = 120.0,
) -> None:
    """Let all nodes in a Ray cluster leave. Their open requests finish first."""
    from engine.routing.ray_nodes.launcher import RayNodes, connect

    nodes = RayNodes(connect(ray, namespace))
    count = len(nodes.names())
    late = nodes.remove_all(timeout_s)
    print(f"{count} nodes left" + (f"; {late} of them had to be ended" if late else ""))
