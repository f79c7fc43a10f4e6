"""From token deltas to events: reasoning, tool calls and echoed prompts, in the order they came."""

import functools
import math
from types import SimpleNamespace

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    FinishEvent,
    GenerationContext,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    ToolChoice,
    UsageEvent,
)
from engine.core.interfaces.request import (
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from engine.core.parsing.output import OutputFormat
from engine.core.text.tokenizer import RenderedPrompt
from engine.frontend.generation import Generation
from engine.frontend.prompts import Prepared, _unfinished, truncated
from engine.frontend.text_model import ChatFormat, TextModel
from tests.support.fakes.stub_engine import ToldEngine

# One character is one token.
CHARS = [bytes([code]) for code in range(128)]
SPECIAL = 1
CHARS[SPECIAL] = b"<s>"
TOKENIZER = SimpleNamespace(
    drops_leading_space=False,
    bytes_table=lambda skip_special, shown: CHARS,
    token_literal=lambda token: CHARS[token],
    decode=lambda ids, skip_special: b"".join(CHARS[token] for token in ids).decode(),
    is_special=lambda token: token == SPECIAL,
)
TEMPLATE = "{% if tools %}<tool_call>{{ tools }}{% endif %}<think>"
OUTPUT = OutputFormat.of(TEMPLATE, {})
CHAT = ChatFormat(None, OUTPUT)
TEXT = TextModel(SimpleNamespace(), TOKENIZER, CHAT, CHAT, None, 0)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def parsed(opened: bool = False) -> Prepared:
    parser = functools.partial(OUTPUT.parser, [WEATHER], ToolChoice(), opened)
    return Prepared((1,), "messages", new_parser=parser)


async def events_of(prepared: Prepared, answer: str, reason: str = "stop", **params) -> list:
    params = SamplingParams(max_tokens=999, **params)
    request = GenerateRequest(request_id="r", prompt=(104, 105), params=params)
    generation = Generation(request, TEXT, prepared, ToldEngine())
    for char in answer[:-1]:
        generation.deliver(TokenDelta("r", 0, (ord(char),)))
    generation.deliver(TokenDelta("r", 0, (ord(answer[-1]),), finish_reason=reason))
    return [event async for event in generation]


def joined(events: list, kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


async def test_reasoning_is_separated_from_the_answer_and_counted():
    answer = "<think>why</think>\n\nbecause"
    events = await events_of(parsed(), answer)
    assert joined(events, ReasoningEvent) == "why"
    assert joined(events, TextEvent) == "because"
    usage = events[-1]
    assert isinstance(usage, UsageEvent)
    assert usage.completion_tokens == len(answer)
    assert len("why") <= usage.reasoning_tokens <= len("<think>why</think>")
    assert events[-2] == FinishEvent(0, "stop")


async def test_reasoning_opened_by_the_prompt_is_recognized():
    events = await events_of(parsed(opened=True), "why</think>because")
    assert (joined(events, ReasoningEvent), joined(events, TextEvent)) == ("why", "because")


async def test_calls_become_events_and_the_finish_reason():
    answer = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    events = await events_of(parsed(), answer)
    calls = [event for event in events if isinstance(event, ToolCallEvent)]
    assert calls[0].name == "weather" and calls[0].call_id
    assert all(call.name is None and call.call_id is None for call in calls[1:])
    assert "".join(call.arguments for call in calls) == '{"city": "Oslo"}'
    assert joined(events, TextEvent) == ""
    assert sum(event.num_tokens for event in events if isinstance(event, TextEvent)) == len(answer)
    assert events[-2] == FinishEvent(0, "tool_calls")


async def test_a_tool_call_cut_by_max_tokens_has_finish_reason_length():
    answer = '<tool_call>{"name": "weather", "arguments": {"ci'
    events = await events_of(parsed(), answer, reason="length")
    assert events[-2] == FinishEvent(0, "length")


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, "ab"), (2, "ab"), (3, "ab.cd"), (5, "ab.cd")]
)
async def test_stop_strings_are_ignored_before_min_tokens(min_tokens, shown):
    plain = Prepared((1,), "prompt")
    events = await events_of(plain, "ab.cd.ef", stop=(".",), min_tokens=min_tokens)
    assert joined(events, TextEvent) == shown
    assert events[-2] == FinishEvent(0, "stop", ".")


@pytest.mark.parametrize("first", [0, 1])
async def test_an_echoed_prompt_comes_first_with_scores_that_only_one_choice_has(first):
    params = SamplingParams(max_tokens=9, n=2, logprobs=0, score_prompt=True)
    request = GenerateRequest(request_id="r", prompt=(104, 105), params=params)
    prepared = Prepared((104, 105), "prompt", continuation=True, echo="hi")
    generation = Generation(request, TEXT, prepared, ToldEngine())
    score = (TokenLogprobs(-0.5),)
    deltas = [
        TokenDelta("r", 0, (33,), score, "length", prompt_logprobs=(TokenLogprobs(-1.5),)),
        TokenDelta("r", 1, (63,), score, "length"),
    ]
    generation.deliver(deltas[first])
    generation.deliver(deltas[1 - first])
    events = [event async for event in generation]
    for choice, text in ((0, "!"), (1, "?")):
        mine = [e for e in events if isinstance(e, TextEvent) and e.choice == choice]
        assert [event.text for event in mine] == ["hi", text]
        echoed = mine[0].logprobs
        assert mine[0].num_tokens == 0
        assert math.isnan(echoed[0].logprob) and echoed[1].logprob == -1.5
        assert [token.token for token in echoed] == ["h", "i"]
    assert events[-1].completion_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "text", "shown"),
    [
        ((SPECIAL, 104, SPECIAL), "<s>h<s>", ["<s>", "h", "<s>"]),  # sent as ids, or parsed
        ((SPECIAL, 104, 105), "hi", ["h", "i"]),  # the tokenizer added BOS
        ((32, 104, 105), "hi", ["", "h", "i"]),  # the tokenizer added a space
    ],
)
async def test_echoed_logprob_tokens_spell_the_prompt(prompt, text, shown):
    params = SamplingParams(max_tokens=9, logprobs=0, score_prompt=True)
    request = GenerateRequest(request_id="r", prompt=prompt, params=params)
    generation = Generation(request, TEXT, Prepared(prompt, "prompt", echo=text), ToldEngine())
    scores = (TokenLogprobs(-1.5),) * (len(prompt) - 1)
    ended = (TokenLogprobs(-0.5),)
    generation.deliver(TokenDelta("r", 0, (SPECIAL,), ended, "length", prompt_logprobs=scores))
    echoed, answer, *_ = [event async for event in generation]
    assert [token.token for token in echoed.logprobs if token.in_text] == shown
    assert "".join(shown) == text == echoed.text
    assert not answer.logprobs[0].in_text, "a generated control token is no text"


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, 10), (4, 4), (99, 10), (-1, 8)], ids=["all", "four", "more", "fits"]
)
def test_prompt_truncation_keeps_the_last_tokens_and_only_on_request(limit, kept):
    context = GenerationContext(
        request_id="r", params=SamplingParams(max_tokens=4), truncate_prompt_tokens=limit
    )
    letters = "abcdefghij"
    prepared = Prepared(tuple(map(ord, letters)), "prompt", echo=letters)
    cut = truncated(TEXT, prepared, context, 12)
    assert cut.token_ids == tuple(map(ord, letters))[-kept:]
    assert cut.echo == letters[-kept:], "the echo is the text of the tokens that are scored"


async def test_a_choice_that_stops_while_its_tokens_wait_for_the_scores_of_another():
    params = SamplingParams(max_tokens=9, n=2, logprobs=0, score_prompt=True, stop=("b",))
    request = GenerateRequest(request_id="r", prompt=(104, 105), params=params)
    prepared = Prepared((104, 105), "prompt", continuation=True, echo="hi")
    generation = Generation(request, TEXT, prepared, ToldEngine())
    score = (TokenLogprobs(-0.5),)
    for char in "abcd":
        generation.deliver(TokenDelta("r", 1, (ord(char),), score))
    scored = (TokenLogprobs(-1.5),)
    generation.deliver(TokenDelta("r", 0, (33,), score, "length", prompt_logprobs=scored))
    events = [event async for event in generation]
    texts = [e.text for e in events if isinstance(e, TextEvent) and e.choice == 1]
    assert "".join(texts) == "hia"
    endings = [event for event in events if isinstance(event, FinishEvent)]
    assert endings == [FinishEvent(0, "length"), FinishEvent(1, "stop", "b")]
    assert events[-1].completion_tokens == 3, "tokens behind a stop string are not counted"


@pytest.mark.parametrize(
    ("content", "ends"),
    [("Hello", "Hello"), ("Hello \n", "Hello \n"), ("\n x", "x"), ("</s>", "</s>")],
)
def test_a_continued_assistant_message_ends_the_prompt_unchanged(content, ends):
    segments = ("assistant\n" + content, 2, "\n")
    cut = _unfinished(RenderedPrompt(segments), content)
    assert cut.segments == ("assistant\n" + content,) and cut.segments[-1].endswith(ends)
    trimmed = _unfinished(RenderedPrompt(("assistant\n" + content.strip(), 2)), content)
    assert trimmed.segments == ("assistant\n" + content.strip(),)
    as_text = _unfinished(RenderedPrompt(("assistant\n" + content + "[END]",)), content)
    assert as_text.segments == ("assistant\n" + content,)


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_message_is_not_continued(content):
    with pytest.raises(InvalidRequestError) as refused:
        _unfinished(RenderedPrompt(("assistant\n", 2, "\n")), content)
    assert refused.value.param == "continue_final_message"
