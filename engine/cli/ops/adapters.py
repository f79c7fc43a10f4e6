"""`engine adapters`: LoRA adapters that servers on this machine offer beside their base model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.console import JsonOption, messages, output

app = typer.Typer(
    help="LoRA adapters that are served beside their base model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The model id that clients use for the adapter.")
]
PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A PEFT folder, or a GGUF file of an adapter.")
]
BaseOption = Annotated[
    str,
    typer.Option("--base", "--model", "-m", metavar="MODEL", help="The base model."),
]


@app.command("ls")
def ls(as_json: JsonOption = False) -> None:
    """List the adapters of the store."""
    from engine.core.store.adapter_store import kept_adapters, records

    paths = kept_adapters()
    rows = [
        {"name": each.name, "base": each.base, "path": str(paths[each.name])} for each in records()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        messages().print("no adapters; `engine adapters add NAME PATH --base MODEL` adds one")
        return
    from rich.table import Table

    table = Table("adapter", "base", "path", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    output().print(table)


@app.command("add")
def add(name: NameArgument, path: PathArgument, base: BaseOption) -> None:
    """Check an adapter, and serve it with its base model from the next start on.

    A running server takes it at once by POST /v1/load_lora_adapter.
    """
    from engine.backends.custom.adapters.reading import open_adapter
    from engine.backends.custom.frontend.adapters import EXAMINER
    from engine.backends.custom.weights.model import open_model
    from engine.core.sandbox.examination import examine
    from engine.core.store.adapter_store import keep_adapter
    from engine.core.store.model_store import default_name, resolve_model

    source = path.expanduser().resolve()
    examine(source, EXAMINER)
    model = open_model(resolve_model(base), reads_weights=False)
    try:
        adapter = open_adapter(source, model.config)
    finally:
        model.close()
    keep_adapter(name, source, default_name(base))
    messages().print(f"{name}: rank {adapter.max_rank}, {len(adapter.pairs)} weights, for {base}")


@app.command("rm")
def rm(name: NameArgument) -> None:
    """Remove an adapter from the store. A running server keeps it until it stops."""
    from engine.core.store.adapter_store import remove_adapter

    remove_adapter(name)
    messages().print(f"removed {name}")
