"""`engine profile`: where a model's time goes, kernel by kernel and on the way to a first token."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.cli.console import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    load_cli_settings,
)
from engine.core.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from engine.backends.custom.options import EngineOptions
    from engine.backends.custom.weights.model import ModelSource

PROMPT_TOKENS = 512  # unless the user says
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
    from engine.backends.custom.profiling import profile_model

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
    from engine.cli.profile_report import print_profile, profile_json

    if as_json:
        print(profile_json(str(source.path), options.framework, found))
    else:
        print_profile(str(source.path), options.framework, found, requests, top, trace)


def _open(model: str, load_format: str) -> "ModelSource":
    from engine.backends.custom.weights.model import open_model
    from engine.backends.custom.weights.random import open_random
    from engine.core.utils.model_store import resolve_model

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
    """Tokens that the context has for a prompt."""
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
    """The prompt's ids, and the seconds it took to find them. The default is cut to what fits."""
    import time

    from engine.backends.custom.text import load_text

    text = load_text(source.path)
    made_up: tuple[int, ...] | None = None
    if prompt is None:
        wanted = count or min(PROMPT_TOKENS, room)
        made_up = text.encode_prompt(_SENTENCE * wanted)[:wanted]
        prompt = text.tokenizer.decode(made_up)
    text.encode_prompt(prompt)  # a server's tokenizer is warm
    began = time.monotonic()
    found = text.encode_prompt(prompt)
    tokenize_s = time.monotonic() - began
    if not found:
        raise InvalidRequestError("the prompt is empty; give it some text", param="prompt")
    return made_up or found, tokenize_s
