"""Turns a drawn request into what the frontend submits."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.core.interfaces.backend import GenerationContext, ToolChoice
from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.request import (
    AdapterRef,
    GenerateRequest,
    ImageInput,
    SamplingParams,
)
from engine.core.parsing.output import OutputFormat
from engine.frontend.prompts import Prepared, encode_words, needs_words
from engine.frontend.text_model import TextModel
from tests.oracle.requests import DrawnRequest

TOOL = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer", "enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
TOOLS = ({"type": "function", "function": TOOL},)
_TUPLES = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "stop_regex", "samplers")


@dataclass(frozen=True)
class Content:
    """What a level makes of the features that only it understands."""

    prompt: tuple[int, ...]
    grammar: str | None = None  # of the answer
    adapter: AdapterRef | None = None
    interp: InterpRequest | None = None
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True)
class Asked:
    request: GenerateRequest
    prepared: Prepared


def params_of(drawn: DrawnRequest) -> SamplingParams:
    fields: dict[str, Any] = dict(drawn.sampling)
    for name in (*_TUPLES, "dry_sequence_breakers"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {token: float(value) for token, value in fields["logit_bias"]}
    return SamplingParams(**{"temperature": 0.0} | fields)


def prepare(
    text: TextModel, output: OutputFormat, drawn: DrawnRequest, content: Content
) -> Prepared:
    """What the frontend makes of a client's request before the engine gets it."""
    params = params_of(drawn)
    prepared = _prepared(text, output, drawn, content, params)
    return encode_words(text, prepared, params) if needs_words(params) else prepared


def ask(
    text: TextModel,
    prepared: Prepared,
    drawn: DrawnRequest,
    content: Content,
    name: str,
    max_seq_len: int,
) -> Asked:
    """The request as the frontend submits it."""
    params = params_of(drawn)
    context = GenerationContext(
        request_id=name,
        params=params,
        priority=drawn["priority"] or 0,
        salt=drawn["salt"] or "",
        tenant=drawn["tenant"] or "",
        timeout_s=drawn["deadline"],
        on_progress=_ignore if drawn["progress"] else None,
        on_wait=_ignore if drawn["progress"] else None,
        interp=content.interp,
    )
    told = (params, text.eos_ids, max_seq_len, content.adapter)
    return Asked(prepared.request(context, *told), prepared)


def _ignore(value: Any) -> None:
    """The server listens itself."""


def _prepared(
    text: TextModel,
    output: OutputFormat,
    drawn: DrawnRequest,
    content: Content,
    params: SamplingParams,
) -> Prepared:
    tools = TOOLS if drawn["tools"] else ()
    choice = ToolChoice(drawn["tools"] or "none")
    echo = "" if params.score_prompt else None
    if drawn["echo"]:
        echo = text.tokenizer.decode(content.prompt, skip_special=False)
    new_parser: Callable[[], Any] | None = None
    grammar = content.grammar
    if tools or drawn["reasoning"]:
        if not drawn["reasoning"]:
            output = replace(output, reasoning=None)
        grammar = output.grammar(tools, choice, True, content.grammar, False)
        new_parser = functools.partial(output.parser, tools, choice, False)
    return Prepared(
        content.prompt,
        "prompt",
        grammar=grammar,
        new_parser=new_parser,
        shown=output.shown_ids(with_tools=bool(tools)) if new_parser else frozenset(),
        continuation=True,
        echo=echo,
        images=content.images,
    )
