"""`engine run`, `engine chat` and `engine generate`: use a model in the terminal."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import (
    ApiKeyFileOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    complete_model,
    messages,
    output,
    read_api_key,
)
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.interfaces.backend import GrammarSpec

SystemOption = Annotated[str | None, typer.Option(help="System message.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", "--n-predict", "-n", min=1, help="Max tokens.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "--temp", min=0, max=2, help="0 is greedy.")
]
TopPOption = Annotated[float | None, typer.Option(min=0, max=1)]
SeedOption = Annotated[
    int | None, typer.Option("--seed", "-s", min=0, help="Same seed, same answers.")
]
UrlOption = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible server that answers; with its address.")
]


def chat(
    model: ModelArgument = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Talk with a model in the terminal."""
    params = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    settings = _given(**{"model.device": device, "model.dtype": dtype})
    _talk(model, url, api_key_file, settings, system, params, uses_server=False)


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="A message. Without it, a conversation begins.")
    ] = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print sampling and speed.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Answer a message, or talk. Downloads the model if it is missing. Uses a server of this
    machine if it serves the model.
    """
    params = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    settings = _given(**{"model.device": device, "model.dtype": dtype})
    text = " ".join(prompt or ())
    if not sys.stdin.isatty():  # `engine run MODEL "Summarize:" < file`
        text = "\n\n".join(filter(None, (text, sys.stdin.read().strip())))
    if not text:
        _talk(model, url, api_key_file, settings, system, params, uses_server=True)
        return
    from engine.cli.talk.chat_clients import open_talker
    from engine.cli.talk.session import answer_printer, sampling_note, usage_note
    from engine.core.interfaces.backend import TextEvent, UsageEvent

    key = read_api_key(api_key_file)
    talker = open_talker(model, url=url, key=key, settings=settings, uses_server=True)
    printer = answer_printer(output())
    asked = [{"role": "system", "content": system}] if system else []
    asked.append({"role": "user", "content": text})
    used = {**talker.defaults, **params}
    if verbose:
        messages().print(f"(sampling: {sampling_note(used)})", style="dim", highlight=False)
    try:
        for event in talker.stream(asked, used):
            if isinstance(event, TextEvent):
                printer.feed(event.text)
            elif isinstance(event, UsageEvent) and verbose:
                messages().print(usage_note(event), style="dim", highlight=False)
        printer.close()
        print()
    finally:
        talker.close()


def _talk(
    model: str | None,
    url: str | None,
    api_key_file: Path | None,
    settings: dict[str, Any],
    system: str | None,
    params: dict[str, Any],
    *,
    uses_server: bool,
) -> None:
    from engine.cli.talk.chat_clients import Talker, open_talker
    from engine.cli.talk.session import TalkSession

    key = read_api_key(api_key_file)

    def reopen(name: str | None) -> Talker:
        return open_talker(name, url=url, key=key, settings=settings, uses_server=uses_server)

    session = TalkSession(output(), reopen(model), system=system, params=params, reopen=reopen)
    try:
        session.run()
    finally:
        session.close()


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Name, file or folder.", autocompletion=complete_model),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    grammar_file: Annotated[
        Path | None, typer.Option(help="The output follows this grammar, in GBNF or Lark.")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", "-j", help="The output is JSON of this schema.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Continue a prompt and print the result."""
    from engine.core.interfaces.backend import TextEvent
    from engine.core.store.catalogue import DEFAULT_MODEL
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    settings = _given(**{"model.device": device, "model.dtype": dtype})
    grammar = _grammar(grammar_file, json_schema)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature or 0.0, top_p=top_p or 1.0, seed=seed
    )
    with LLM(model or DEFAULT_MODEL, settings=settings) as llm:
        if chat:
            asked = [{"role": "user", "content": text}]
            events = llm.stream_chat(asked, params, grammar=grammar)
        else:
            events = llm.stream(text, params, grammar=grammar)
        for event in events:
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)
        print()


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _grammar(file: Path | None, schema: str | None) -> "GrammarSpec | None":
    from engine.core.interfaces.backend import GrammarSpec

    if file is not None and schema is not None:
        raise ConfigError("--grammar-file and --json-schema exclude each other")
    if schema is not None:
        return GrammarSpec(kind="json_schema", source=schema, param="--json-schema")
    if file is None:
        return None
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}.") from None
    return GrammarSpec(kind="grammar", source=source, param="--grammar-file")
