"""Rules for /v1/completions, which autocompletion and evaluation harnesses still use."""

from typing import Any

from engine_tools.conformance.expect import (
    RuleFailed,
    RuleSkipped,
    expect,
    field,
    is_count,
    is_number,
    items,
    short,
    text,
)
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules.chat import check_usage
from engine_tools.conformance.sse import DONE
from engine_tools.conformance.target import COMPLETIONS, Target

HARNESS = "lm-evaluation-harness"
EDITOR = "Continue"
_IDS = [300, 301, 302]


async def _missing(target: Target) -> str | None:
    return await target.lacks(COMPLETIONS, target.completion(max_tokens=1))


COMPLETIONS_GROUP = Group("completions", _missing)


async def _plain(target: Target) -> Any:
    async def ask() -> Any:
        return (await target.post(COMPLETIONS, target.completion())).ok()

    return await target.once("plain completion", ask)


@COMPLETIONS_GROUP.rule(
    "CMP-01",
    "An answer has the shape of a text_completion",
    client=EDITOR,
    sees="no suggestion",
)
async def shape(target: Target) -> None:
    body = await _plain(target)
    expect(field(body, "object") == "text_completion", f"object is {short(body['object'])}")
    expect(is_count(field(body, "created")), f"created is {short(body['created'])}")
    text(body, "id")
    first = items(body, "choices")[0]
    expect(bool(text(first, "text")), "text is empty")
    expect(field(first, "index") == 0, f"index is {short(first['index'])}")
    reason = field(first, "finish_reason")
    expect(reason in ("stop", "length"), f"finish_reason is {short(reason)}")


@COMPLETIONS_GROUP.rule(
    "CMP-02", "usage is there and adds up", client="LiteLLM", sees="wrong cost and token counts"
)
async def usage(target: Target) -> None:
    check_usage(field(await _plain(target), "usage"))


@COMPLETIONS_GROUP.rule(
    "CMP-03",
    "A list of prompts gives a choice for each, in order",
    client=HARNESS,
    sees="answers of the wrong prompt",
)
async def prompts(target: Target) -> None:
    body = target.completion(["The capital of France is", "One, two, three,"])
    found = items((await target.post(COMPLETIONS, body)).ok_unless_refused("prompt"), "choices")
    indexes = [field(each, "index") for each in found]
    expect(indexes == [0, 1], f"indexes are {indexes}")
    alone = field(await _plain(target), "choices", 0, "text")
    expect(found[0]["text"][:8] == alone[:8], f"{short(found[0]['text'])}, alone {short(alone)}")


@COMPLETIONS_GROUP.rule(
    "CMP-04",
    "A prompt of token ids is accepted",
    client=HARNESS,
    sees="a 400: it sends ids by default",
)
async def token_ids(target: Target) -> None:
    body = (await target.post(COMPLETIONS, target.completion(_IDS, max_tokens=2))).ok()
    count = field(body, "usage", "prompt_tokens")
    expect(count in (3, 4), f"3 ids count as {count} prompt tokens")


@COMPLETIONS_GROUP.rule(
    "CMP-05",
    "A list of lists of token ids is accepted",
    client=HARNESS,
    sees="a 400: it sends batches of ids",
)
async def lists_of_ids(target: Target) -> None:
    body = (await target.post(COMPLETIONS, target.completion([_IDS, _IDS[:2]], max_tokens=2))).ok()
    expect(len(items(body, "choices")) == 2, f"{len(body['choices'])} choices for two prompts")


@COMPLETIONS_GROUP.rule(
    "CMP-06",
    "Token ids that the model has not are refused",
    client=HARNESS,
    sees="a crash of the engine, or nonsense from another model's ids",
)
async def bad_ids(target: Target) -> None:
    (await target.post(COMPLETIONS, target.completion([10**8]))).refused()


@COMPLETIONS_GROUP.rule(
    "CMP-07",
    "An empty prompt is no server failure",
    client=EDITOR,
    sees="InternalServerError in an empty file",
)
async def empty_prompt(target: Target) -> None:
    prompts: tuple[Any, ...] = ("", [])
    for prompt in prompts:
        reply = await target.post(COMPLETIONS, target.completion(prompt, max_tokens=2))
        expect(reply.status < 500, f"prompt {prompt!r}: {reply.summary}")


@COMPLETIONS_GROUP.rule(
    "CMP-08",
    "A prompt of another type is refused",
    client="openai-python",
    sees="an answer to something else, or three failures",
)
async def bad_prompt(target: Target) -> None:
    (await target.post(COMPLETIONS, target.completion({"text": "Hi"}))).refused()


@COMPLETIONS_GROUP.rule(
    "CMP-09",
    "echo puts the prompt before the answer",
    client=HARNESS,
    sees="loglikelihood tasks can't be run",
)
async def echo(target: Target) -> None:
    body = target.completion(echo=True)
    answer = (await target.post(COMPLETIONS, body)).ok_unless_refused("echo")
    said = field(answer, "choices", 0, "text")
    expect(said.startswith(body["prompt"]), f"the text is {short(said)}")
    expect(len(said) > len(body["prompt"]), "nothing follows the prompt")


@COMPLETIONS_GROUP.rule(
    "CMP-10",
    "echo with logprobs scores the prompt, its first token with null",
    client=HARNESS,
    sees="wrong loglikelihoods",
)
async def echo_logprobs(target: Target) -> None:
    body = target.completion(echo=True, logprobs=1, max_tokens=1)
    answer = (await target.post(COMPLETIONS, body)).ok_unless_refused("echo")
    values = items(answer, "choices", 0, "logprobs", "token_logprobs")
    expect(len(values) > 3, f"{len(values)} scores for prompt and answer")
    expect(values[0] is None, f"the first score is {short(values[0])}")
    expect(all(is_number(each) and each <= 0 for each in values[1:]), f"scores: {short(values)}")


async def _logprobs(target: Target) -> Any:
    async def ask() -> Any:
        body = target.completion(logprobs=2, max_tokens=4)
        answer = (await target.post(COMPLETIONS, body)).ok_unless_refused("logprobs")
        return field(answer, "choices", 0)

    return await target.once("completion logprobs", ask)


@COMPLETIONS_GROUP.rule(
    "CMP-11",
    "logprobs are four lists of one length",
    client=HARNESS,
    sees="an IndexError",
)
async def logprobs(target: Target) -> None:
    found = field(await _logprobs(target), "logprobs")
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lengths = {name: len(items(found, name)) for name in names}
    expect(set(lengths.values()) == {4}, f"for 4 tokens: {lengths}")
    values = found["token_logprobs"]
    expect(all(is_number(each) and each <= 0 for each in values), f"scores: {short(values)}")


@COMPLETIONS_GROUP.rule(
    "CMP-12",
    "logprobs: the tokens join to the text, at their offsets",
    client=HARNESS,
    sees="scores of the wrong words",
)
async def logprob_text(target: Target) -> None:
    choice = await _logprobs(target)
    tokens, offsets = field(choice, "logprobs", "tokens"), choice["logprobs"]["text_offset"]
    expect("".join(tokens) == choice["text"], f"tokens {short(tokens)}, {short(choice['text'])}")
    steps = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    expect(steps == [len(token) for token in tokens[:-1]], f"offsets are {offsets}")


@COMPLETIONS_GROUP.rule(
    "CMP-13",
    "logprobs: as many alternatives as asked for, and the chosen token",
    client=HARNESS,
    sees="a wrong is_greedy",
)
async def logprob_top(target: Target) -> None:
    found = field(await _logprobs(target), "logprobs")
    for token, top in zip(found["tokens"], items(found, "top_logprobs"), strict=False):
        expect(2 <= len(top) <= 3, f"{len(top)} alternatives, not 2 or 3")
        expect(token in top, f"{short(token)} is not in {short(top)}")


@COMPLETIONS_GROUP.rule(
    "CMP-14",
    "stop ends the text and is not part of it",
    client=EDITOR,
    sees="more lines than wanted in the user's file",
)
async def stop(target: Target) -> None:
    whole = field(await _plain(target), "choices", 0, "text")
    mark = whole[3:5]
    if not mark:
        raise RuleSkipped("the model's answer is too short to stop in")
    answer = (await target.post(COMPLETIONS, target.completion(stop=mark))).ok()
    said = field(answer, "choices", 0, "text")
    expect(said == whole[: whole.index(mark)], f"{short(said)} before {short(mark)}")
    reason = field(answer, "choices", 0, "finish_reason")
    expect(reason == "stop", f"finish_reason is {short(reason)}")


@COMPLETIONS_GROUP.rule(
    "CMP-15",
    "A suffix is used, or refused by name",
    client=EDITOR,
    sees="suggestions that repeat what follows the cursor",
)
async def suffix(target: Target) -> None:
    plain = field(await _plain(target), "usage", "prompt_tokens")
    body = target.completion(suffix=" It is a large city in Europe.", max_tokens=2)
    reply = await target.post(COMPLETIONS, body)
    if reply.status != 200:
        expect("suffix" in reply.refused().message, reply.summary)
        return
    count = field(reply.json(), "usage", "prompt_tokens")
    expect(count > plain, f"{count} prompt tokens, as without a suffix")


@COMPLETIONS_GROUP.rule(
    "CMP-16",
    "A stream is text_completion chunks, one finish_reason, then [DONE]",
    client=EDITOR,
    sees="no suggestion, or one that never ends",
)
async def stream(target: Target) -> None:
    found = await target.stream(COMPLETIONS, target.completion())
    expect(not found.problems, "; ".join(found.problems[:3]))
    expect(found.num_done == 1 and found.events[-1].data == DONE, "it does not end with [DONE]")
    kinds = {field(chunk, "object") for chunk in found.chunks}
    expect(kinds == {"text_completion"}, f"objects are {sorted(kinds)}")
    each = [items(chunk, "choices")[0] for chunk in found.chunks]
    reasons = [choice["finish_reason"] for choice in each if field(choice, "finish_reason")]
    expect(len(reasons) == 1, f"finish reasons are {reasons}")
    said = "".join(text(choice, "text") for choice in each)
    whole = field(await _plain(target), "choices", 0, "text")
    expect(said == whole, f"{short(said)} streamed, {short(whole)} whole")


@COMPLETIONS_GROUP.rule(
    "CMP-17",
    "A stream with include_usage ends with usage and no choices",
    client="LiteLLM",
    sees="no token counts",
)
async def stream_usage(target: Target) -> None:
    body = target.completion(stream_options={"include_usage": True}, max_tokens=2)
    chunks = (await target.stream(COMPLETIONS, body)).chunks
    last = field(chunks, -1)
    expect(field(last, "choices") == [], f"its choices are {short(last['choices'])}")
    check_usage(field(last, "usage"))
    early = [chunk for chunk in chunks[:-1] if chunk.get("usage") is not None]
    expect(not early, f"{len(early)} chunks before the last have usage")


@COMPLETIONS_GROUP.rule(
    "CMP-18",
    "Without max_tokens an answer has 16 tokens at most",
    client="clients written for OpenAI",
    sees="answers that run to the end of the context",
    severity="advice",
)
async def default_length(target: Target) -> None:
    body = target.completion("1, 2, 3, 4,")
    del body["max_tokens"]
    count = field((await target.post(COMPLETIONS, body)).ok(), "usage", "completion_tokens")
    expect(count <= 16, f"{count} tokens")


@COMPLETIONS_GROUP.rule(
    "CMP-19",
    "logprobs of 1000 is refused",
    client="openai-python",
    sees="the parameter is silently ignored, or three failures",
)
async def many_logprobs(target: Target) -> None:
    (await target.post(COMPLETIONS, target.completion(logprobs=1000, max_tokens=1))).refused()


@COMPLETIONS_GROUP.rule(
    "CMP-20",
    "best_of below n is refused",
    client="openai-python",
    sees="the parameter is silently ignored, or three failures",
)
async def best_of(target: Target) -> None:
    body = target.completion(n=2, best_of=1, temperature=1, max_tokens=1)
    reply = await target.post(COMPLETIONS, body)
    if reply.status == 200:
        raise RuleFailed("accepted in silence", is_advice=True)
    reply.refused()
