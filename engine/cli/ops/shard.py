"""`engine shard`: gives this machine's GPU or CPU to a model that is cut over several machines."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

RANK_MODULE = "engine.torch.execution.distributed.rank"
REFUSED = 2
PAUSE_S = 1.0


def shard(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="The engine's `shards.listen`, as this machine reaches it."
        ),
    ],
    token_file: Annotated[
        Path, typer.Option(help="File with the token that the engine has as shards.token_file.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The same model on this machine; default: the same path as there."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device of this rank; default: the first of the engine's kind.")
    ] = "",
) -> None:
    """Run one rank of an engine on another machine, and join again whenever it restarts."""
    from engine.core.shards.link import read_token, split_address
    from engine.core.store.model_store import needs_pull, resolve_model

    split_address(address)
    read_token(token_file)
    if model is not None and needs_pull(model):
        from engine.cli.pull_progress import pull_shown

        pull_shown(model)
    path = str(resolve_model(model)) if model is not None else ""
    argv = [sys.executable, "-m", RANK_MODULE, "join", address, str(token_file), path, device]
    while True:
        status = subprocess.run(argv, check=False).returncode
        if status == REFUSED:
            raise typer.Exit(1)
        time.sleep(PAUSE_S)
