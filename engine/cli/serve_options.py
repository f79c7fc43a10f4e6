"""The options of `engine serve` that no other command has."""

from pathlib import Path
from typing import Annotated, Any

import typer

HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")]
NameOption = Annotated[str | None, typer.Option(help="Model id that clients use.")]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Option of a backend other than our own, such as python=/opt/vllm/bin/python;"
        " can be repeated.",
    ),
]
MaxSequenceLengthOption = Annotated[
    int | None, typer.Option(help="Context in tokens; default: the model's.")
]
BatchSizeOption = Annotated[int | None, typer.Option(help="Most sequences computed in one step.")]
MemoryPoolSizeOption = Annotated[
    int | None, typer.Option(help="KV cache in MiB; default: planned from free memory.")
]
GpuMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", help="Share of the GPU's free memory to use; default: 0.9."
    ),
]
CacheOption = Annotated[
    bool | None, typer.Option("--cache/--no-cache", help="Share common prefixes.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads for the model.")]
AffinityOption = Annotated[
    str | None, typer.Option(help="CPUs to bind the native threads to: auto, off or 0-3,8.")
]
NumericsOption = Annotated[
    str | None,
    typer.Option(help="invariant: answers never depend on batch mates; fast: they may."),
]
QuantizationOption = Annotated[
    str | None, typer.Option(help="Weights as fp8 or int8, on a GPU; auto: as they are stored.")
]
KvDtypeOption = Annotated[
    str | None, typer.Option(help="Keys and values as auto, float32, bfloat16 or int8.")
]
InsecureNoAuthOption = Annotated[
    bool | None, typer.Option("--insecure-no-auth", help="Serve other machines without a key.")
]
StrictOption = Annotated[
    bool | None,
    typer.Option("--strict", help="Refuse what would be emulated or clamped, with 400."),
]
StoragePathOption = Annotated[
    Path | None, typer.Option(help="Directory of stored responses, files and batches.")
]
LogLevelOption = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormatOption = Annotated[str | None, typer.Option(help="pretty or json.")]


def parse_options(given: list[str] | None) -> dict[str, Any] | None:
    """`name=value` each; a value is written as in TOML, or is text."""
    if not given:
        return None
    from engine.backends.factory import option_value
    from engine.core.errors import ConfigError

    options: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {each}: write it as NAME=VALUE")
        options[name] = option_value(text)
    return options
