"""The official `openai` client against `engine serve` on the real model."""

import json
import time
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


QUESTION = [{"role": "user", "content": "Name the capital of France."}]
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": PLACE, "strict": True},
}


def named(tool: str) -> dict:
    return {"type": "function", "function": {"name": tool}}


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    dark: bool


def test_chat_answers_in_sensible_english(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")


TEMPLATED = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"


def test_a_request_may_carry_its_own_chat_template(client, model, server):
    conversation = {"messages": [{"role": "user", "content": "Say hello."}]}
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
    prompt = f"{system} Face<|im_end|>\n{TEMPLATED}"
    ask = {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True}
    answer = client.completions.create(**ask, extra_body={"parse_special": True})
    ids = httpx.post(f"{server.url}/tokenize", json=conversation).json()["tokens"]
    assert answer.usage.prompt_tokens == len(ids)
    # The same prompt as ids: its text and the offsets of its tokens agree.
    for choice in (
        answer.choices[0],
        client.completions.create(**ask | {"prompt": ids}).choices[0],
    ):
        assert choice.text.startswith(prompt)
        told = choice.logprobs
        for token, offset in zip(told.tokens[:-1], told.text_offset[:-1], strict=True):
            assert choice.text.startswith(token, offset)
    raw = client.completions.with_raw_response.create(model=model, prompt=TEMPLATED, max_tokens=1)
    assert "parse_special: <|im_start|>" in raw.headers["x-engine-warnings"]
    assert raw.parse().usage.prompt_tokens > 20


def test_a_prediction_is_accepted_and_changes_nothing(client, model):
    ask = {"model": model, "messages": QUESTION, "temperature": 0.7, "seed": 5, "max_tokens": 40}
    plain = client.chat.completions.create(**ask)
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    text = plain.choices[0].message.content
    for content in (text, [{"type": "text", "text": text}]):
        prediction = {"type": "content", "content": content}
        answer = client.chat.completions.create(**ask, prediction=prediction)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    wrong = {"type": "content", "content": text.replace(" ", " not ")}
    answer = client.chat.completions.create(**ask, prediction=wrong)
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens >= 0
    assert answer.usage.completion_tokens == plain.usage.completion_tokens


def test_streamed_deltas_concatenate_to_the_whole_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert len({c.id for c in chunks}) == 1


def test_completions_honour_n_seed_and_stop(client, model):
    def ask(**extra):
        return client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=12, n=2, seed=5, **extra
        )

    first, again = ask(), ask()
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    stopped = client.completions.create(
        model=model, prompt="Count: one two three", temperature=0, max_tokens=40, stop=[" "]
    )
    assert " " not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs_of_chat_and_of_completions(client, model):
    chat = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert bytes(token.bytes).decode() == token.token
    legacy = client.completions.create(
        model=model, prompt="The sky is", temperature=0, max_tokens=4, logprobs=2
    )
    tokens = legacy.choices[0].logprobs.tokens
    assert "".join(tokens) == legacy.choices[0].text
    assert legacy.choices[0].logprobs.text_offset[1] == len(tokens[0])


def test_penalties_logit_bias_and_max_tokens_change_the_output(client, model):
    def text(**extra):
        return (
            client.completions.create(
                model=model, prompt="la la la la", temperature=0, max_tokens=16, **extra
            )
            .choices[0]
            .text
        )

    plain = text()
    assert text(extra_body={"repetition_penalty": 1.9}) != plain
    assert text(presence_penalty=2.0) != plain
    biased = text(logit_bias={"504": 100})  # one token, always
    assert len(set(biased.split())) == 1
    longer = client.completions.create(
        model=model,
        prompt="Hi",
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True, "min_tokens": 24},
    )
    assert longer.usage.completion_tokens == 24


def test_models_retrieve_finds_the_model_and_404s_an_unknown_one(client, model):
    entry = client.models.retrieve(model)
    assert entry.id == model and entry.object == "model" and entry.max_model_len > 1000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/nothing")


def test_invalid_requests_raise_typed_openai_exceptions(client, model):
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-99", messages=QUESTION)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature" and bad.value.request_id.startswith("req-")
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model=model, prompt="word " * 9000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model=model, prompt="word", max_tokens=9000)
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.chat.completions.create(
            model=model, messages=QUESTION, stream_options={"include_usage": True}
        )
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(
            model=model, messages=QUESTION, tools=[WEATHER], tool_choice=named("no_such_tool")
        )
    with pytest.raises(openai.BadRequestError, match="Token id"):
        client.completions.create(model=model, prompt=[10**6], max_tokens=1)


def test_special_tokens_in_user_text_are_plain_text(client, model):
    def count(text):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=1, temperature=0
        ).usage.prompt_tokens

    # As a control token it would be one token; as text it is several.
    assert count("a<|im_end|>b") >= count("ab") + 4


def test_required_tool_is_called_and_its_result_is_accepted(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        max_tokens=160,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call, *_) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "18 degrees"}
        for each in choice.message.tool_calls
    ]
    turns = [*WEATHER_QUESTION, choice.message, *results]
    after = client.chat.completions.create(
        model=model, messages=turns, tools=[WEATHER], tool_choice="none", max_tokens=16
    )
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_the_stream_helper_sees_a_tool_call_grow_and_end(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER],
        tool_choice=named("get_weather"),
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=160,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments["city"] in ("Paris", "Rome")


def test_chat_parse_returns_an_instance_of_the_pydantic_model(client, model):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "What colour is grass?"}],
        response_format=Colour,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_stream_helper_parses_structured_output(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "What colour is blood?"}],
        response_format=Colour,
        temperature=0,
        max_tokens=100,
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Colour)
    assert text == final.choices[0].message.content


def test_embeddings_are_the_same_in_both_encodings(client, model):
    texts = ["The cat sat on the mat.", "Stock prices fell."]
    encoded = client.embeddings.create(model=model, input=texts)  # base64, by the SDK's choice
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    for one, two in zip(encoded.data, plain.data, strict=True):
        assert one.index == two.index
        assert one.embedding == pytest.approx(two.embedding, abs=1e-3)
    assert encoded.data[0].embedding != encoded.data[1].embedding
    assert encoded.usage.prompt_tokens > 0


def test_responses_are_stored_continued_and_deleted(client, model):
    first = client.responses.create(
        model=model, input="Name the capital of France.", temperature=0, max_output_tokens=32
    )
    assert "Paris" in first.output_text and first.status == "completed"
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model,
        input="Is it large?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=16,
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_api_streams_and_parses_structured_output(client, model):
    question = "Name the capital of France."
    with client.responses.stream(
        model=model, input=question, temperature=0, max_output_tokens=32
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert text == final.output_text and "Paris" in text
    parsed = client.responses.parse(
        model=model, input="What colour is grass?", text_format=Colour, temperature=0
    )
    assert isinstance(parsed.output_parsed, Colour)


def test_a_batch_file_is_processed_and_its_output_downloaded(client, model):
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": QUESTION, "max_tokens": 4, "temperature": 0},
        }
        for number in range(2)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts.completed == 2
    output = client.files.content(batch.output_file_id).text.splitlines()
    answers = {json.loads(line)["custom_id"]: json.loads(line)["response"] for line in output}
    assert set(answers) == {"request-0", "request-1"}
    assert answers["request-0"]["body"]["choices"][0]["message"]["content"]
    assert file.id in [each.id for each in client.files.list()]
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
