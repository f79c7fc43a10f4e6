"""`engine generate`: continue a prompt and print the result as it comes."""

import sys
from typing import Annotated

import typer

from engine.cli.console import DeviceOption, DtypeOption


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name, file or folder.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
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
    from engine.llm import DEFAULT_MODEL, LLM

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
