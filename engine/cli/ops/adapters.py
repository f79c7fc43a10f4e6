"""`engine adapters`: LoRA adapters that servers on this machine offer beside their base model."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from engine.cli.console import JsonOption, messages, output
from engine.cli.convert import TypeOption
from engine.cli.help import VerbGroup

app = typer.Typer(
    cls=VerbGroup,
    help="LoRA adapters that are served beside their base model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The model id that clients use for the adapter.")
]
PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A PEFT folder, a GGUF file, or an address: hf:ORG/REPO or a URL."
    ),
]
BaseOption = Annotated[
    str,
    typer.Option("--base", "--model", "-m", metavar="MODEL", help="The base model."),
]
AdapterArgument = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="A name of the store, a folder or a file.")
]
TargetArgument = Annotated[Path, typer.Argument(metavar="DST", help="A file or folder to write.")]
OwnBaseOption = Annotated[
    str | None,
    typer.Option("--base", "--model", "-m", metavar="MODEL", help="Default: that of the store."),
]


@app.command("list")
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
    from rich.table import Column, Table

    # A name or a path that is cut would be of no use.
    columns = [Column(each, overflow="fold") for each in ("adapter", "base", "path")]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    output().print(table)


@app.command("add")
def add(name: NameArgument, path: PathArgument, base: BaseOption) -> None:
    """Check an adapter, and serve it with its base model from the next start on.

    A running server takes it at once by POST /v1/load_lora_adapter.
    """
    from engine.adapters import VALIDATOR
    from engine.adapters.reading import open_adapter
    from engine.core.sandbox.checkpoint_validation import validate
    from engine.core.store.adapter_store import keep_adapter
    from engine.core.store.model_store import default_name, resolve_model
    from engine.weights.model import open_model

    with _local(path) as source:
        validate(source, VALIDATOR)
        with closing(open_model(resolve_model(base), reads_weights=False)) as model:
            adapter = open_adapter(source, model.config)
        keep_adapter(name, source, default_name(base))
    messages().print(f"{name}: rank {adapter.max_rank}, {len(adapter.pairs)} weights, for {base}")


@contextmanager
def _local(path: str) -> Iterator[Path]:
    """The files of an adapter on this machine. Those of an address are downloaded, and deleted
    again.
    """
    from engine.core.store.adapter_store import is_address

    if not is_address(path):
        yield Path(path).expanduser().resolve()
        return
    from engine.cli.pull_progress import TerminalProgress
    from engine.core.store.pull import pull_adapter

    with TemporaryDirectory() as folder, TerminalProgress(messages()) as progress:
        yield pull_adapter(path, Path(folder), progress)


@app.command("merge")
def merge(
    name: AdapterArgument,
    target: TargetArgument,
    base: OwnBaseOption = None,
    dtype: TypeOption = None,
) -> None:
    """Add an adapter to the weights of its base model. Prints the new model's path."""
    from engine.cli.convert import convert

    path, base = _found(name, base)
    convert(base, target, dtype=dtype, merge=path)


@app.command("export")
def export(adapter: AdapterArgument, target: TargetArgument, base: OwnBaseOption = None) -> None:
    """Write an adapter as a GGUF file (DST ends in .gguf) or as a PEFT folder. Prints its path."""
    from engine.conversion.lora_export import export_gguf
    from engine.core.errors import ConfigError
    from engine.core.store.checkpoint_files import PEFT_FILES
    from engine.core.store.model_store import resolve_model

    path, base = _found(adapter, base)
    if target.exists():
        raise ConfigError(f"{target} is there already; remove it, or choose another name")
    if target.suffix == ".gguf":
        export_gguf(path, resolve_model(base), target)
    elif path.is_file():
        raise ConfigError(f"{path.name} is a GGUF file already; PEFT folders are not made of them")
    else:
        target.mkdir(parents=True)
        for each in PEFT_FILES:
            shutil.copyfile(path / each, target / each)
    print(target)


def _found(name: str, base: str | None) -> tuple[Path, str]:
    """The path and the base model of an adapter. `name` is a name in the store, or a path."""
    from engine.core.errors import ConfigError
    from engine.core.store.adapter_store import kept_adapters, records

    kept = {each.name: each.base for each in records()}
    path = Path(name).expanduser()
    if name in kept:
        path, base = kept_adapters()[name], base or kept[name]
    if not path.exists():
        raise ConfigError(f"no adapter of the store, no folder and no file is called '{name}'")
    if base is None:
        raise ConfigError("--base is needed: the adapter is not one of the store")
    return path, base


@app.command("rm")
def rm(name: NameArgument) -> None:
    """Remove an adapter from the store. A running server keeps it until it stops."""
    from engine.core.store.adapter_store import remove_adapter

    remove_adapter(name)
    messages().print(f"removed {name}")
