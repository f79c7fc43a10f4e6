"""`engine profile`: shows a model's time per kernel, and the phases of its time to first token."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.cli.console import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    load_cli_settings,
    output,
)
from engine.core.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from rich.table import Table

    from engine.ipc.options import EngineOptions
    from engine.tools.profiling import FirstToken, Profile
    from engine.weights.model import ModelSource


PROMPT_TOKENS = 512  # default length of the prompt, in tokens
_SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody asked it why. "


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file or a folder.")],
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="What every request continues.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", min=1, help="Length of a made-up prompt. Default: 512."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens per request.")] = 64,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests at once.")] = 1,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="dummy: random weights; MODEL is a folder with only a config.json."),
    ] = "auto",
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (chrome://tracing)."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Kernels to show.")] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model and show where its time goes."""
    from engine.tools.profiling import profile_model

    if prompt is not None and (prompt_tokens is not None or load_format == "dummy"):
        raise ConfigError(
            "--prompt goes neither with --prompt-tokens nor with --load-format dummy; leave it out"
        )
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace {trace}: there is no folder {trace.absolute().parent}")
    flags = {"model.backend": backend, "model.device": device, "model.dtype": dtype}
    with closing(_open(model, load_format)) as source:
        options = _options(source, config, flags)
        room = _room(source, options, tokens)
        if load_format == "dummy":
            ids, tokenize_s = _random_ids(source, min(prompt_tokens or PROMPT_TOKENS, room)), None
        else:
            ids, tokenize_s = _tokenized(source, prompt, prompt_tokens, room)
        if len(ids) > room:
            raise ConfigError(
                f"a prompt of {len(ids):,} tokens and {tokens:,} new ones exceed the context of "
                f"{room + tokens:,}; lower --prompt-tokens or --tokens"
            )
        found = profile_model(source, options, [ids] * requests, tokens, tokenize_s, trace)

    if as_json:
        print(profile_json(str(source.path), options.framework, found))
    else:
        print_profile(str(source.path), options.framework, found, requests, top, trace)


def _open(model: str, load_format: str) -> "ModelSource":
    from engine.core.store.model_store import resolve_model
    from engine.weights.model import open_model
    from engine.weights.random import open_random

    path = resolve_model(model)
    if load_format == "auto":
        source = open_model(path)
    elif path.is_dir():
        source = open_random(path)
    else:
        raise ConfigError(f"--load-format dummy reads a folder's config.json; {path} is a file")
    if source.config.encoder is None:
        return source
    source.close()
    raise ConfigError(f"{path.name} is a text encoder, and profiles are of models that write text")


def _options(
    source: "ModelSource", config: Path | None, flags: dict[str, str | None]
) -> "EngineOptions":
    from engine.backends.custom.engine_settings import backend_name, engine_options, has_engine

    settings = load_cli_settings(config, flags).settings
    name = backend_name(settings)
    if not has_engine(name):
        raise ConfigError(f"backend '{name}' is not ours to profile; use native, torch or jax")
    return engine_options(settings, name, source.path)


def _room(source: "ModelSource", options: "EngineOptions", new_tokens: int) -> int:
    """The max number of prompt tokens. The prompt and `new_tokens` generated tokens must fit into
    the context together.
    """
    most = source.config.max_position
    context = min(options.max_seq_len or most, most)
    if new_tokens >= context:
        raise ConfigError(
            f"{new_tokens:,} new tokens leave no room for a prompt in a context of {context:,}; "
            "lower --tokens"
        )
    return context - new_tokens


def _random_ids(source: "ModelSource", count: int) -> tuple[int, ...]:
    import numpy as np

    return tuple(np.random.default_rng(0).integers(0, source.config.vocab_size, count).tolist())


def _tokenized(
    source: "ModelSource", prompt: str | None, count: int | None, room: int
) -> tuple[tuple[int, ...], float]:
    """The prompt's token ids, and the seconds that tokenizing took. If no prompt is given, a
    built-in sentence is repeated and cut to `count` tokens, or to the default length.
    """
    import time

    from engine.frontend.text_model import load_text

    text = load_text(source.path)
    made_up: tuple[int, ...] | None = None
    if prompt is None:
        wanted = count or min(PROMPT_TOKENS, room)
        made_up = text.encode_prompt(_SENTENCE * wanted)[:wanted]
        prompt = text.tokenizer.decode(made_up)
    text.encode_prompt(prompt)  # warm up first, because a server's tokenizer is warm too
    began = time.monotonic()
    found = text.encode_prompt(prompt)
    tokenize_s = time.monotonic() - began
    if not found:
        raise InvalidRequestError("the prompt is empty; give it some text", param="prompt")
    return made_up or found, tokenize_s


_NAME_WIDTH = 64


def profile_json(path: str, backend: str, found: "Profile") -> str:
    facts = asdict(found)
    facts["first_token"]["total_s"] = found.first_token.total_s
    facts["kernels_s"] = sum(kernel.seconds for kernel in found.kernels)
    return json.dumps({"path": path, "backend": backend, **facts}, indent=2)


def print_profile(
    path: str, backend: str, found: "Profile", requests: int, top: int, trace: Path | None
) -> None:
    console = output()
    prompt, new = found.num_prompt_tokens // requests, found.num_new_tokens // requests
    lines = [
        f"{path}: {backend} on {found.device}, {found.dtype}",
        f"{requests} x {prompt:,} tokens in, {new:,} out: {found.seconds:.3f} s, "
        f"{found.num_new_tokens / found.seconds:,.0f} new tokens/s, {found.num_steps:,} steps",
        *_host(found),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("", _first_token_table(found.first_token), "")
    if found.kernels:
        console.print(_kernel_table(found, top))
    else:
        console.print("PyTorch's profiler saw no kernel: CUPTI is missing, or may not be used here")
    if trace is not None:
        console.print(f"Trace: {trace}", highlight=False, markup=False, soft_wrap=True)


def _host(found: "Profile") -> Iterator[str]:
    """Yields lines that say how long a step takes, how long the host works in it, and how busy the
    device is. Yields nothing if the model runs on the CPU, because host and device are the same
    then.
    """
    if found.device != "cpu":
        step_ms = 1e3 * found.seconds / found.num_steps
        host_ms = 1e3 * found.host_s / found.num_steps
        busy = sum(kernel.seconds for kernel in found.kernels) / found.recorded_s
        yield f"A step takes {step_ms:.3f} ms, the host's own work in it {host_ms:.3f} ms"
        yield f"Kernels ran in {busy:.0%} of the recorded time"


def _first_token_table(first: "FirstToken") -> "Table":
    total = first.total_s
    parts = {
        "tokenize": first.tokenize_s,
        "queue": first.queue_s,
        "prefill": first.prefill_s,
        "first sample": first.first_sample_s,
        "total": total,
    }
    table = _table("time to first token", "ms", "share")
    for name, seconds in parts.items():
        if seconds is not None:
            table.add_row(name, f"{1e3 * seconds:.3f}", f"{seconds / total:.1%}")
    return table


def _kernel_table(found: "Profile", top: int) -> "Table":
    total = sum(kernel.seconds for kernel in found.kernels)
    table = _table("kernel", "calls", "ms", "share", "us each")

    def add(name: str, calls: int, seconds: float) -> None:
        row: tuple[Any, ...] = (f"{calls:,}", f"{1e3 * seconds:.3f}", f"{seconds / total:.1%}")
        table.add_row(_short(name), *row, f"{1e6 * seconds / calls:.1f}")

    for kernel in found.kernels[:top]:
        add(kernel.name, kernel.calls, kernel.seconds)
    rest = found.kernels[top:]
    if rest:
        calls = sum(kernel.calls for kernel in rest)
        add(f"{len(rest)} others", calls, sum(kernel.seconds for kernel in rest))
    return table


def _table(first: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _short(name: str) -> str:
    """Shorten a kernel name, which template arguments can make very long."""
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."
