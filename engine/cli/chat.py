"""`engine chat` and `engine generate`: use a model in the terminal. The model runs in this
process.
"""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.console import (
    DeviceOption,
    DtypeOption,
    ModelArgument,
    messages,
    output,
    print_error,
)
from engine.core.errors import EngineError

with contextlib.suppress(ImportError):  # some Python builds lack readline
    import readline  # noqa: F401 - gives `input` arrow keys and history

if TYPE_CHECKING:
    from rich.console import Console

    from engine.core.interfaces.request import SamplingParams
    from engine.llm import LLM

PROMPT = "you> "
# The control characters \x01 and \x02 enclose invisible text, which readline must not count in the
# width of the line.
COLORED_PROMPT = "\x01\x1b[1;32m\x02you>\x01\x1b[0m\x02 "
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it."


def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens per answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same answers.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Talk with a model in the terminal."""
    from engine.core.interfaces.request import SamplingParams
    from engine.core.store.catalogue import DEFAULT_MODEL
    from engine.llm import LLM

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    overrides = {"model.device": device, "model.dtype": dtype}
    settings = {key: value for key, value in overrides.items() if value is not None}
    with messages().status("Loading the model ..."):
        llm = LLM(model or DEFAULT_MODEL, settings=settings)
    with llm:
        console = output()
        console.print(f"[bold]{llm.card.id}[/] is ready. {HELP}", highlight=False)
        opening = [{"role": "system", "content": system}] if system else []
        conversation = list(opening)
        while (line := _read_line(console)) is not None:
            if line == "/reset":
                conversation = list(opening)
                console.print("[dim]The conversation is forgotten.[/]")
            elif line:
                conversation.append({"role": "user", "content": line})
                answer = _answer(console, llm, conversation, params)
                if answer is None:
                    conversation.pop()
                else:
                    conversation.append({"role": "assistant", "content": answer})


def _read_line(console: "Console") -> str | None:
    """Read the user's next line. Returns None if the user ends the conversation."""
    is_plain = console.no_color or not console.is_terminal
    try:
        line = input(PROMPT if is_plain else COLORED_PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line == "/exit" else line


def _answer(
    console: "Console", llm: "LLM", conversation: list[dict[str, str]], params: "SamplingParams"
) -> str | None:
    """Print the model's answer as it is generated, and return it. Ctrl-C stops the answer; the text
    so far is kept.

    If the generation fails, prints the error and returns None.
    """
    from engine.core.interfaces.backend import TextEvent, UsageEvent

    pieces: list[str] = []
    console.print("[bold blue]model>[/] ", end="")
    events = llm.stream_chat(conversation, params)
    try:
        for event in events:
            if isinstance(event, TextEvent):
                pieces.append(event.text)
                console.print(event.text, end="", markup=False, highlight=False, soft_wrap=True)
            elif isinstance(event, UsageEvent):
                rate = (event.completion_tokens - 1) / event.decode_s if event.decode_s else 0.0
                note = f"{event.completion_tokens} tokens, {rate:.0f} tok/s"
                console.print(f"\n[dim]({note}, {event.cached_tokens} cached)[/]", highlight=False)
    except KeyboardInterrupt:
        events.close()
        console.print("\n[dim](cut short)[/]")
    except EngineError as error:
        console.print()
        print_error(error)
        return None
    return "".join(pieces)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name, file or folder.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Max tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Continue a prompt and print the result."""
    from engine.core.interfaces.backend import TextEvent
    from engine.core.interfaces.request import SamplingParams
    from engine.core.store.catalogue import DEFAULT_MODEL
    from engine.llm import LLM

    text = sys.stdin.read() if prompt == "-" else prompt
    overrides = {"model.device": device, "model.dtype": dtype}
    settings = {key: value for key, value in overrides.items() if value is not None}
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with LLM(model or DEFAULT_MODEL, settings=settings) as llm:
        if chat:
            events = llm.stream_chat([{"role": "user", "content": text}], params)
        else:
            events = llm.stream(text, params)
        for event in events:
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)
        print()
