"""`engine rm`: removes downloaded models, and the packed copies that the native kernels made."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.console import complete_model, messages
from engine.core.errors import ConfigError, NotFoundError


def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Names of `engine list`.", autocompletion=complete_model
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Only packed copies, which a start makes again.")
    ] = False,
) -> None:
    """Remove downloaded models and their packed copies. Shows the sizes and asks first."""
    from engine.cli.model_report import human_bytes
    from engine.core.store.model_store import ModelStore, full_spec

    store = ModelStore()
    here = store.models()
    by_source = {model.source: name for name, model in here.items()}
    found = [name if name in here else by_source.get(full_spec(name), "") for name in names]
    if "" in found:
        missing = names[found.index("")]
        raise NotFoundError(f"no model called {missing!r} is here; `engine list` shows the names")
    copies = {name: packed_copies(store.path(here[name])) for name in found}
    console = messages()
    for name in found:
        size = 0 if packed else here[name].size
        extra = sum(copy.stat().st_size for copy in copies[name])
        text = f"{name}: {human_bytes(size)}, packed copies {human_bytes(extra)}"
        console.print(text, markup=False, highlight=False)
    if not yes and not _confirmed():
        raise ConfigError("nothing is removed")
    for name in found:
        for copy in copies[name]:
            copy.unlink(missing_ok=True)
        if not packed:
            store.remove(name)
        console.print(f"{name} is removed.", markup=False, highlight=False)


def packed_copies(path: Path) -> list[Path]:
    """The packed copies of a model. Their names begin with the stem of the model's path. A copy of
    another model with the same stem may be among them; it is made again at that model's next start.
    """
    from engine.core.folders import store_directory

    return sorted((store_directory().parent / "packed").glob(f"{path.stem[:64]}-*.packed"))


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("add --yes to remove without being asked")
    return input("Remove? [y/N] ").strip().lower() in ("y", "yes")
