"""The official `openai` client against `engine serve` on the real model."""

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_answers_in_sensible_english(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")


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


def test_completions_choices_stop_and_seed(client, model):
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


def test_logprobs_of_both_kinds(client, model):
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


def test_penalties_bias_and_limits_do_something(client, model):
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


def test_models(client, model):
    entry = client.models.retrieve(model)
    assert entry.id == model and entry.object == "model" and entry.max_model_len > 1000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/nothing")


def test_mistakes_are_typed_exceptions(client, model):
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
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model=model, messages=QUESTION, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="token id"):
        client.completions.create(model=model, prompt=[10**6], max_tokens=1)


def test_special_tokens_in_user_text_are_plain_text(client, model):
    def count(text):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=1, temperature=0
        ).usage.prompt_tokens

    # As a control token it would be one token; as text it is several.
    assert count("a<|im_end|>b") >= count("ab") + 4
