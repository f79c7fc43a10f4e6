"""The official `anthropic` client against `engine serve` on the real model."""

import anthropic
import httpx
import pytest


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(server):
    return {
        "model": server.model,
        "max_tokens": 48,
        "system": "You answer in one short sentence.",
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "extra_body": {"temperature": 0},
    }


WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_a_message_and_its_stream_agree(client, ask):
    whole = client.messages.create(**ask)
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    # The second one found its prompt in the cache; the sum stays the prompt.
    assert streamed.usage.cache_read_input_tokens > 0
    assert prompt_tokens(streamed) == prompt_tokens(whole)


def prompt_tokens(message):
    usage = message.usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["plain", "tools"])
def test_count_tokens_equals_the_usage_of_the_answer(client, ask, tools):
    extra = {"tools": tools} if tools else {}
    message = client.messages.create(**ask, **extra)
    counted = client.messages.count_tokens(
        model=ask["model"], system=ask["system"], messages=ask["messages"], **extra
    )
    assert counted.input_tokens == prompt_tokens(message)


def test_a_forced_tool_is_called_with_valid_input(client, ask):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        limits = {"max_tokens": 128, "tools": [WEATHER], "tool_choice": choice}
        message = client.messages.create(**ask | limits)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        assert call.name == "get_weather"
        assert list(call.input) == ["city"]
        assert isinstance(call.input["city"], str)
        with client.messages.stream(**ask | limits) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[-1].input == call.input


def test_stop_sequences_and_max_tokens_end_the_answer(client, ask):
    stopped = client.messages.create(**ask, stop_sequences=["France"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")
    assert "France" not in stopped.content[0].text
    short = client.messages.create(**ask | {"max_tokens": 2})
    assert short.stop_reason == "max_tokens"
    assert short.usage.output_tokens == 2


def test_a_prompt_that_is_too_long_is_a_bad_request(client, ask):
    long = [{"role": "user", "content": "word " * 100_000}]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**ask | {"messages": long})


def test_tokenize_and_detokenize_round_trip(server):
    def post(path, **body):
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    text = "Grüße, 世界! <|im_start|>user\n"
    plain = post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
    assert plain["count"] == len(plain["tokens"]) == len(plain["token_strs"])
    assert post("/detokenize", tokens=plain["tokens"])["prompt"] == text
    # The control token that a template writes; the same letters in a text are not it.
    chat = post("/tokenize", messages=[{"role": "user", "content": text}], return_token_strs=True)
    controls = [
        token
        for token, word in zip(chat["tokens"], chat["token_strs"], strict=True)
        if word == "<|im_start|>"
    ]
    assert controls
    assert controls[0] not in plain["tokens"]
    usage = httpx.post(
        server.url + "/v1/chat/completions",
        json={
            "model": server.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        },
    ).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]
