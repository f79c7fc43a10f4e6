"""`engine convert`: converts a model from one file format to another. `engine imatrix`: measures
which columns of its matrices matter most.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.cli.console import messages

FormatOption = Annotated[
    Literal["gguf", "safetensors", "llama2c"] | None,
    typer.Option("--to", help="Format. Default: by DST: .gguf, .bin (llama2c), else a folder."),
]
TypeOption = Annotated[
    Literal["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K", "Q4_0", "IQ4_XS"]
    | None,
    typer.Option("--type", help="How weights are stored. Default: as now; F16 if merged."),
]
ChunksOption = Annotated[
    int, typer.Option("--chunks", min=1, help="Windows of 512 tokens to use of the text.")
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
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", metavar="FILE", help="An importance matrix, for quantizing."),
    ] = None,
    merge: Annotated[
        Path | None,
        typer.Option("--merge", metavar="ADAPTER", help="A LoRA adapter to add to the weights."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="TEXT",
            help="A text file. Prints the perplexity and the KL divergence from SRC on it.",
        ),
    ] = None,
    chunks: ChunksOption = 8,
) -> None:
    """Convert a model, with its tokenizer and chat template. Prints what was written."""
    from engine.cli.pull_progress import TerminalProgress
    from engine.conversion.convert import convert as convert_model

    path = path_of(source)
    with TerminalProgress(messages(), verb="writing") as progress:
        convert_model(
            path,
            target,
            to=to,
            dtype=dtype,
            tokenizer=tokenizer,
            importance=imatrix,
            adapter=merge,
            progress=lambda done, total: progress.update(target.name, done, total),
        )
    print(target)
    if check is not None:
        _print_quality(path, target, check, chunks)


def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a GGUF or a folder.")],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")
    ] = Path("imatrix.gguf"),
    chunks: ChunksOption = 64,
) -> None:
    """Measure the activations of a model on a text. `engine convert --imatrix` uses the result."""
    from contextlib import closing

    from engine.cli.pull_progress import TerminalProgress
    from engine.conversion.importance import write_importance
    from engine.tools.quality import importance_of, windows_of
    from engine.weights.model import open_model

    with closing(open_model(path_of(model))) as source:
        windows = windows_of(source, text, chunks)
        with TerminalProgress(messages(), verb="running") as progress:
            sums = importance_of(
                source, windows, lambda done, total: progress.update(text.name, done, total)
            )
    write_importance(out, sums, text.name, len(windows), len(windows[0]))
    print(out)


def path_of(model: str) -> Path:
    from engine.core.store.model_store import resolve_model

    path = Path(model)
    return path if path.exists() else resolve_model(model)


def _print_quality(source: Path, target: Path, text: Path, chunks: int) -> None:
    from contextlib import closing

    from engine.cli.pull_progress import TerminalProgress
    from engine.tools.quality import compare_models, windows_of
    from engine.weights.model import open_model

    with closing(open_model(source)) as model:
        windows = windows_of(model, text, chunks)
    with TerminalProgress(messages(), verb="checking") as progress:
        found = compare_models(
            source, target, windows, lambda done, total: progress.update(text.name, done, total)
        )
    print(f"tokens             {found.num_tokens}")
    print(f"perplexity         {found.perplexity:.3f} (of {source.name}: ", end="")
    print(f"{found.reference_perplexity:.3f})")
    print(f"KL divergence      {found.divergence:.5f} nats")
    print(f"same likeliest     {found.same_top:.1%}")
