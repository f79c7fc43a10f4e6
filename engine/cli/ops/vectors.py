"""`engine vectors`: trains, lists and converts steering vectors, and imports autoencoders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, messages, output
from engine.cli.help import VerbGroup
from engine.core.errors import ConfigError
from engine.core.store.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from engine.core.interp.vectors import VectorStore

app = typer.Typer(
    cls=VerbGroup,
    help='Named vectors of this machine, for `"vector": NAME` in requests.',
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the vector is called.")]


def _store(config: Path | None) -> "VectorStore":
    from engine.core.interp.vectors import VectorStore

    return VectorStore(load_cli_settings(config).settings.vectors_dir)


@app.command()
def train(
    name: NameArgument,
    pos: Annotated[Path, typer.Option("--pos", help="Texts that have the property, one per line.")],
    neg: Annotated[Path, typer.Option("--neg", help="As many texts that lack it.")],
    model: Annotated[str, typer.Option("--model", help="A name or a path.")] = DEFAULT_MODEL,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Such as 8-20 or 5,9. Default: the middle half."),
    ] = None,
    method: Annotated[
        Literal["mean", "pca"], typer.Option("--method", help="Mean difference, or PCA of pairs.")
    ] = "mean",
    config: ConfigOption = None,
) -> None:
    """Train a steering vector from two files of texts."""
    from engine.library.steering import tensors_of
    from engine.library.steering import train as train_vectors
    from engine.llm import LLM

    store, told = _store(config), messages()
    texts = _lines(pos), _lines(neg)
    with LLM(model) as llm:
        chosen = _layers(layers, llm.num_layers)
        total = len(texts[0]) + len(texts[1])
        vectors = train_vectors(
            llm, *texts, chosen, method, lambda done: told.print(f"{done}/{total} texts", end="\r")
        )
    facts = {"model": model, "method": method, "pairs": str(len(texts[0]))}
    path = store.save(name, tensors_of(vectors), facts)
    span = f"{chosen[0]}-{chosen[-1]}" if len(chosen) > 1 else str(chosen[0])
    output().print(f"{name}: layers {span}, {total} texts, {path}", highlight=False)


@app.command("list")
def list_vectors(json_output: JsonOption = False, config: ConfigOption = None) -> None:
    """List the vectors, autoencoders and tuned lenses."""
    import json

    found = _store(config).names()
    if json_output:
        rows = [
            {"name": v.name, "kind": v.kind, "sites": v.sites, "size": v.size, **v.metadata}
            for v in found
        ]
        output().print_json(json.dumps(rows))
        return
    for v in found:
        sites = f"{v.sites[0]} .. {v.sites[-1]}" if len(v.sites) > 1 else "".join(v.sites)
        output().print(f"{v.name}  {v.kind}  {v.size}  {sites}", highlight=False)
    if not found:
        messages().print("There are no vectors. Make one: engine vectors train NAME --pos --neg")


@app.command("import")
def import_file(
    name: NameArgument,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A .gguf control vector, a .safetensors, or an SAE-lens folder."
        ),
    ],
    config: ConfigOption = None,
) -> None:
    """Import a control vector of llama.cpp, a safetensors file, or an autoencoder of SAE-lens."""
    from engine.library.steering import read_vectors, tensors_of

    if not path.exists():
        raise ConfigError(f"there is no {path}")
    vectors, facts = read_vectors(path)
    saved = _store(config).save(name, tensors_of(vectors), facts)
    output().print(f"{name}: {len(vectors)} tensors, {saved}", highlight=False)


@app.command()
def export(
    name: NameArgument,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .gguf or .safetensors file.")],
    config: ConfigOption = None,
) -> None:
    """Export a vector as a GGUF control vector (for llama.cpp), or as safetensors."""
    from engine.core.interp.features import matrix
    from engine.core.tensor_file import StoredTensor, pack_tensors
    from engine.library.steering import write_gguf

    tensors, facts = _store(config).load(name)
    if path.suffix == ".gguf":
        vectors = {each.name: matrix(each) for each in tensors.values()}
        write_gguf(path, vectors, facts.get("model", ""))
    elif path.suffix == ".safetensors":
        whole = [StoredTensor(t.name, t.dtype, t.shape, t.data) for t in tensors.values()]
        path.write_bytes(pack_tensors(whole, facts))
    else:
        raise ConfigError(f"{path}: the name must end in .gguf or .safetensors")
    output().print(str(path), highlight=False)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _layers(given: str | None, count: int) -> list[int]:
    if given is None:
        return list(range(count // 4, count - count // 4))
    found: list[int] = []
    try:
        for part in given.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"--layers {given}: write it as 8-20 or 5,9") from None
    if not found or min(found) < 0 or max(found) >= count:
        raise ConfigError(f"--layers {given}: the model has layers 0 to {count - 1}")
    return found
