"""Rules of single clients: mistakes that were found by running them, on any endpoint. If the server
lacks an endpoint, its rules are skipped.
"""

from typing import Any

from engine_tools.conformance.expect import (
    RuleFailed,
    RuleSkipped,
    expect,
    field,
    items,
    short,
    text,
)
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules import messages, responses
from engine_tools.conformance.rules.structured import COLOUR
from engine_tools.conformance.target import CHAT, COMPLETIONS, Target

FIM, TOKENIZE, TOKENIZER = "/v1/fim/completions", "/tokenize", "/tokenizer_info"
CODEX_TOOLS = (
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "agents", "description": "Agents.", "tools": []},
)
TOOL = {"name": "paint", "description": "Paints.", "parameters": COLOUR}

CLIENTS = Group("clients")


async def _need(target: Target, path: str, body: dict[str, Any]) -> None:
    if (reason := await target.lacks(path, body)) is not None:
        raise RuleSkipped(reason)


async def _control_token(target: Target) -> str:
    """The name of a control token of the model. The rule is skipped if the server tells none."""
    reply = await target.get(TOKENIZER)
    found = reply.json().get("eos_token") if reply.status == 200 else None
    if not isinstance(found, str) or not found:
        raise RuleSkipped(f"no {TOKENIZER} to learn a control token from")
    return found


@CLIENTS.rule(
    "CLI-01",
    "Offered tools that the server can't run do not fail a response",
    client="Codex",
    sees="every request fails: it always offers web_search and a namespace",
)
async def offered_tools(target: Target) -> None:
    await _need(target, responses.PATH, responses.body(target))
    request = responses.body(target, tools=list(CODEX_TOOLS), client_metadata={"session_id": "1"})
    field((await target.post(responses.PATH, request)).ok(), "output")


@CLIENTS.rule(
    "CLI-02",
    "text.format may accompany a named tool_choice",
    client="instructor (RESPONSES_TOOLS)",
    sees="every structured request fails",
)
async def format_and_choice(target: Target) -> None:
    await _need(target, responses.PATH, responses.body(target))
    shape = {"type": "json_schema", "name": "paint", "schema": COLOUR}
    request = responses.body(
        target,
        "Paint it green.",
        tools=[{"type": "function"} | TOOL],
        tool_choice={"type": "function", "name": "paint"},
        text={"format": shape},
        max_output_tokens=160,
    )
    output = items((await target.post(responses.PATH, request)).ok(), "output")
    called = [each for each in output if each.get("type") == "function_call"]
    expect(bool(called), f"output is {short(output)}")


@CLIENTS.rule(
    "CLI-03",
    "With continuous_usage_stats every chunk counts its tokens",
    client="guidellm, vLLM's benchmarks",
    sees="no token counts of answers that are cut off",
)
async def running_usage(target: Target) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = target.chat(stream=True, stream_options=options, max_tokens=4)
    reply = await target.post(CHAT, request)
    if reply.status != 200:
        reply.ok_unless_refused("continuous_usage_stats")
    *chunks, last = (await target.stream(CHAT, request)).chunks
    counts = [field(chunk, "usage", "completion_tokens") for chunk in chunks]
    total = field(last, "usage", "completion_tokens")
    expect(counts == sorted(counts), f"the counts are {short(counts)}")
    expect(counts[-1] == total, f"the last of them is {counts[-1]}, and the total {total}")
    prompts = {field(chunk, "usage", "prompt_tokens") for chunk in (*chunks, last)}
    expect(len(prompts) == 1 and 0 not in prompts, f"the prompt has {short(prompts)} tokens")


@CLIENTS.rule(
    "CLI-04",
    "A text block has citations only if there are some",
    client="@ai-sdk/anthropic",
    sees="generateText fails: it can't read the answer",
)
async def no_citations(target: Target) -> None:
    await _need(target, messages.PATH, messages.body(target))
    answer = (await target.post(messages.PATH, messages.body(target))).ok()
    for block in items(answer, "content"):
        expect(block.get("citations", []) is not None, "citations is null")


@CLIENTS.rule(
    "CLI-05",
    "message_start has the number of input tokens",
    client="Claude Code",
    sees="an empty context meter while the answer is written",
)
async def started_usage(target: Target) -> None:
    await _need(target, messages.PATH, messages.body(target))
    whole = (await target.post(messages.PATH, messages.body(target))).ok()
    stream = await target.stream(messages.PATH, messages.body(target))
    told = messages.num_input(field(stream.chunks, 0, "message"))
    expected = messages.num_input(whole)
    expect(told == expected, f"{told} input tokens at the start of a stream of {expected}")


@CLIENTS.rule(
    "CLI-06",
    "A refused thread carries error.details.error_code",
    client="anthropic-python (tool_runner)",
    sees="the run fails, instead of going on without a thread",
)
async def thread(target: Target) -> None:
    await _need(target, messages.PATH, messages.body(target))
    reply = await target.post(messages.PATH, messages.body(target, thread={"type": "create"}))
    if reply.status == 200:
        raise RuleSkipped("the server takes a thread")
    code = field(reply.refused().error, "details", "error_code")
    expect(code == "thread_unsupported_request", f"error_code is {short(code)}")


@CLIENTS.rule(
    "CLI-07",
    "The tokenizer tells its control tokens and its template",
    client="lm-eval (a remote tokenizer)",
    sees="no evaluation: it stops with an error",
    severity="advice",
)
async def tokenizer_info(target: Target) -> None:
    reply = await target.get(TOKENIZER)
    if reply.status in (404, 405):
        raise RuleFailed(f"no {TOKENIZER}", is_advice=True)
    for name in ("bos_token", "eos_token", "chat_template"):
        field(reply.ok(), name)


@CLIENTS.rule(
    "CLI-08",
    "The tokens of an echoed prompt of ids are where text_offset says",
    client="lm-eval",
    sees="log-probabilities of the wrong part of the text",
)
async def echoed_ids(target: Target) -> None:
    conversation = {"model": target.model, "messages": target.chat()["messages"]}
    tokenized = await target.post(TOKENIZE, conversation)
    if tokenized.status != 200:
        raise RuleSkipped(f"no {TOKENIZE} of conversations")
    ids = items(tokenized.json(), "tokens")
    request = target.completion(ids, echo=True, logprobs=0, max_tokens=1)
    answer = (await target.post(COMPLETIONS, request)).ok_unless_refused("echo")
    said, told = text(answer, "choices", 0, "text"), field(answer, "choices", 0, "logprobs")
    tokens, offsets = items(told, "tokens")[: len(ids)], items(told, "text_offset")[: len(ids)]
    for token, offset in zip(tokens, offsets, strict=True):
        is_there = said.startswith(token, offset) or "\N{REPLACEMENT CHARACTER}" in token
        expect(is_there, f"{short(token)} is not at {offset} of {short(said)}")


@CLIENTS.rule(
    "CLI-09",
    "A streamed prompt that is too long is a 400 on every API",
    client="LiteLLM, Claude Code",
    sees="an answer that breaks off, instead of a fallback or a shorter conversation",
)
async def streamed_overflow(target: Target) -> None:
    length = target.context_length or 200_000
    if length > 400_000:
        raise RuleSkipped(f"a context of {length} tokens is too long to overflow here")
    long = "word " * (length + 200)
    for path, request in (
        (CHAT, target.chat(long)),
        (COMPLETIONS, target.completion(long)),
        (responses.PATH, responses.body(target, long)),
        (messages.PATH, messages.body(target, long)),
    ):
        reply = await target.post(path, request | {"stream": True})
        if reply.status not in (404, 405):
            expect(reply.status == 400, f"{path}: {reply.summary}")


@CLIENTS.rule(
    "CLI-10",
    "The model may be left out if there is only one",
    client="clients of llama-server",
    sees="a 400 to a request that names no model",
    severity="advice",
)
async def no_model(target: Target) -> None:
    listed = items((await target.get("/v1/models")).ok(), "data")
    if len(listed) > 1:
        raise RuleSkipped(f"{len(listed)} models are served")
    request = {name: value for name, value in target.chat().items() if name != "model"}
    reply = await target.post(CHAT, request)
    if reply.status != 200:
        raise RuleFailed(reply.summary, is_advice=True)


@CLIENTS.rule(
    "CLI-11",
    "/v1/fim/completions answers in the form of a chat",
    client="Continue",
    sees="no autocompletion",
)
async def fill_in(target: Target) -> None:
    request = {"model": target.model, "prompt": "def one():", "max_tokens": 4}
    await _need(target, FIM, request)
    text((await target.post(FIM, request)).ok(), "choices", 0, "message", "content")
    stream = await target.stream(FIM, request)
    deltas = [field(each, "choices", 0, "delta") for each in stream.chunks if each["choices"]]
    expect(any(delta.get("content") for delta in deltas), "no delta has content")


@CLIENTS.rule(
    "CLI-12",
    "parse_special makes one token of a control token's name",
    client="scripts that render a chat template themselves",
    sees="a prompt whose template is read as text",
    severity="advice",
)
async def parsed_special(target: Target) -> None:
    name = await _control_token(target)
    request = target.completion(f"{name}{name}", parse_special=True, max_tokens=1)
    answer = (await target.post(COMPLETIONS, request)).ok_unless_refused("parse_special")
    count = field(answer, "usage", "prompt_tokens")
    expect(count in (2, 3), f"two control tokens are {count} tokens")
