"""`engine convert`: converts a model from one file format to another."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.cli.console import messages

FormatOption = Annotated[
    Literal["gguf", "safetensors", "llama2c"] | None,
    typer.Option("--to", help="Format. Default: by DST: .gguf, .bin (llama2c), else a folder."),
]
TypeOption = Annotated[
    Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K"] | None,
    typer.Option("--type", help="How weights are stored. Default: as they are now."),
]


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A name, a GGUF, a folder, or a llama2.c .bin.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A file or folder to write.")],
    to: FormatOption = None,
    dtype: TypeOption = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="Of a llama2.c model. Default: tokenizer.bin beside it.",
        ),
    ] = None,
) -> None:
    """Convert a model, with its tokenizer and chat template. Prints what was written."""
    from engine.backends.custom.conversion.convert import convert as convert_model
    from engine.cli.pull_progress import TerminalProgress
    from engine.core.store.model_store import resolve_model

    path = Path(source)
    if not path.exists():
        path = resolve_model(source)
    with TerminalProgress(messages(), verb="writing") as progress:
        convert_model(
            path,
            target,
            to=to,
            dtype=dtype,
            tokenizer=tokenizer,
            progress=lambda done, total: progress.update(target.name, done, total),
        )
    print(target)
