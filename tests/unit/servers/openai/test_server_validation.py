"""Every field of a request: what is accepted, what it becomes, and how a wrong value is refused."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.request import SamplingParams
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.openai.schema import ChatBody, CompletionBody
from engine.servers.schema.body import SamplingBody, parse_body
from tests.support.fakes.fake_backend import CONTEXT_LENGTH, MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

INTEGERS = {
    "max_tokens": (1, CONTEXT_LENGTH),
    "max_completion_tokens": (1, CONTEXT_LENGTH),
    "min_tokens": (0, CONTEXT_LENGTH),
    "top_k": (-1, 2**24),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, 16),
    "priority": (-100, 100),
    "top_logprobs": (0, 20),
    "repeat_last_n": (-1, 2**24),
    "dry_allowed_length": (0, 2**24),
    "dry_penalty_last_n": (-1, 2**24),
    "min_keep": (0, 2**24),
    "mirostat": (0, 2),
}
FLOATS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "top_n_sigma": (-1, 100),
    "typical_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 10),
    "dynatemp_exponent": (0, 100),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 10),
}
# As JSON text, since Python's own encoder would not write some of them.
NEVER_NUMBERS = ["NaN", "Infinity", "-Infinity", '"1"', "true", "1e999", "[]", "{}", "9" * 5000]
HUGE = [2**65, -(2**65), 1e308, -1e308]

CARD = FakeBackend().models()[0]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(), FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def params_of(**fields: Any) -> SamplingParams:
    return parse_body(ChatBody, chat(**fields)).params(CARD)


def refusal_of(kind: type[SamplingBody], raw: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(kind, raw)
    return caught.value


async def post_text(client: httpx.AsyncClient, path: str, text: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await client.post(path, content=text.encode("utf-8"), headers=headers)


def with_field(name: str, value: str) -> str:
    return json.dumps(chat(logprobs=True))[:-1] + f', "{name}": {value}}}'


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
async def test_numeric_chat_parameters_are_accepted_and_refused_at_their_bounds(
    client: httpx.AsyncClient, name: str
) -> None:
    low, high = (INTEGERS | FLOATS)[name]
    wrong = [*NEVER_NUMBERS, json.dumps(low - 2), json.dumps(high + 1), *map(json.dumps, HUGE)]
    if name in INTEGERS:
        wrong.append("1.5")
    for value in wrong:
        response = await post_text(client, "/v1/chat/completions", with_field(name, value))
        assert response.status_code == 400, (name, value[:30], response.text)
        assert len(response.content) < 4096
    for value in (low, high, None):
        extra = {"max_tokens": high} if name == "min_tokens" else {}
        parse_body(ChatBody, chat(logprobs=True, **extra, **{name: value})).params(CARD)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("best_of", 1, 20), ("logprobs", 0, 20), ("truncate_prompt_tokens", -1, 2**24)],
)
async def test_numeric_completion_parameters_are_accepted_and_refused_at_their_bounds(
    client: httpx.AsyncClient, name: str, low: int, high: int
) -> None:
    start = json.dumps({"model": MODEL, "prompt": "x"})[:-1]
    wrong = [*NEVER_NUMBERS, str(low - 1), str(high + 1), "1.5", *map(json.dumps, HUGE)]
    for value in wrong:
        response = await post_text(client, "/v1/completions", f'{start}, "{name}": {value}}}')
        assert response.status_code == 400, (name, value[:30], response.text)
        assert len(response.content) < 4096
    for number in (low, high, None):
        parse_body(CompletionBody, {"model": MODEL, "prompt": "x", name: number}).params(CARD)


def test_default_sampling_parameters_of_chat_and_completions() -> None:
    params = params_of()
    assert params == SamplingParams(max_tokens=None)  # the rest of the context
    assert params.temperature == 1.0
    completion = parse_body(CompletionBody, {"model": MODEL, "prompt": "x"})
    assert completion.params(CARD) == SamplingParams(max_tokens=16)


def test_sampling_fields_reach_the_sampling_params() -> None:
    given = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "seed": 11,
        "n": 3,
        "ignore_eos": True,
        "repeat_last_n": 64,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 256,
        "top_n_sigma": 1.5,
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "min_keep": 2,
        "dynatemp_range": 0.25,
        "dynatemp_exponent": 2.0,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
    }
    texts = {"bad_words": ["x"], "stop_regex": ["y+"], "dry_sequence_breakers": ["z"]}
    ids = {"allowed_token_ids": [1, 2]}
    made = params_of(**texts, **ids, samplers=["penalties", "top_k", "typ_p"], top_k=5, top_p=0.5)
    assert made == SamplingParams(
        max_tokens=None,
        **{name: tuple(value) for name, value in (texts | ids).items()},
        samplers=("penalties", "top_k", "typical_p"),
        top_k=5,  # top_p is off, because it is not among the samplers
    )
    assert params_of(stop_regex="y+").stop_regex == ("y+",)
    lists = {"stop": ["a", "b"], "stop_token_ids": [4, 5], "logit_bias": {"3": -100, "4": 1.5}}
    assert params_of(**given, **lists, logprobs=True, top_logprobs=5) == SamplingParams(
        **given,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        logit_bias={3: -100.0, 4: 1.5},
        logprobs=5,
    )
    assert params_of(max_completion_tokens=5).max_tokens == 5
    assert params_of(top_k=-1).top_k == 0
    assert params_of(top_p=0) == params_of(top_k=1)  # nothing but the best token
    assert 0 <= params_of(seed=2**64 - 1).seed < 2**63  # type: ignore[operator]
    assert 0 <= params_of(seed=-1).seed < 2**63  # type: ignore[operator]
    assert params_of(logprobs=True).logprobs == 0
    assert params_of(top_logprobs=0).logprobs is None


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ("", ()), ("x", ("x",)), ([], ()), (["a", ""], ("a",))]
)
def test_stop_may_be_a_string_a_list_or_null(stop: Any, expected: tuple[str, ...]) -> None:
    assert params_of(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", "y" * 257]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids.0"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"7": True}}, "logit_bias.7"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"user": "u" * 513}, "user"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": "immense"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ],
)
def test_errors_name_the_path_of_the_invalid_field(fields: dict[str, Any], param: str) -> None:
    error = refusal_of(ChatBody, chat(**fields))
    assert error.param == param
    assert param in error.message


def test_message_content_may_be_text_parts_or_null() -> None:
    body = parse_body(
        ChatBody,
        {
            "model": MODEL,
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}] * 2, "name": "bob"},
                {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
            ],
        },
    )
    assert body.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "name": "bob", "content": "a\na"},
        {"role": "assistant", "content": ""},
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ("x",)),
        ("", ("",)),
        (["x", "y"], ("x", "y")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_may_be_texts_token_ids_or_lists_of_them(prompt: Any, expected: Any) -> None:
    assert parse_body(CompletionBody, {"model": MODEL, "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], 5, [1, -1], [1, True], [1, 2.0], [1, 2**31], [None], ["x"] * 129, {"a": 1}],
)
def test_malformed_prompts_are_refused(prompt: Any) -> None:
    error = refusal_of(CompletionBody, {"model": MODEL, "prompt": prompt})
    assert error.param is not None and error.param.startswith("prompt")


def test_error_messages_name_only_the_first_unknown_keys() -> None:
    error = refusal_of(ChatBody, chat(**{f"key_{i}": 1 for i in range(100_000)}))
    assert "key_0" in error.message
    assert len(error.message) < 500


def test_limits_that_involve_two_fields_are_checked() -> None:
    for fields, param in (
        ({"max_tokens": CONTEXT_LENGTH + 1}, "max_tokens"),
        ({"max_completion_tokens": CONTEXT_LENGTH + 1}, "max_completion_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ):
        body = parse_body(ChatBody, chat(**fields))
        with pytest.raises(InvalidRequestError) as caught:
            body.params(CARD)
        assert caught.value.param == param
        assert param in caught.value.message


def test_validation_errors_are_few_and_echo_little() -> None:
    wrong = dict.fromkeys((*INTEGERS, *FLOATS), "x" * 1000)
    error = refusal_of(ChatBody, chat(**wrong))
    assert "xxx" not in error.message
    assert error.message.count("got a string of 1000 characters") == 10
    assert error.message.endswith(f"and {len(wrong) - 10} more.")
