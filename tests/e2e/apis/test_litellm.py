"""LiteLLM against `engine serve` on the real model, under the two prefixes that users choose."""

import json
import os

import pytest

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def litellm():
    """The module, which takes seconds to import. It calls nobody but the server."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches its price list
    import litellm

    litellm.telemetry = False
    litellm.drop_params = False
    litellm.num_retries = 0
    return litellm


@pytest.fixture(scope="module", params=["hosted_vllm", "openai"])
def ask(request, litellm, server):
    """`litellm.completion` of our model under one prefix."""
    fixed = {"model": f"{request.param}/{server.model}", "api_base": f"{server.url}/v1"}

    def completion(**fields):
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 32}
        return litellm.completion(**fixed, api_key="unused", max_retries=0, **body | fields)

    return completion


def test_completion_answers_and_counts_usage(ask):
    answer = ask()
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streaming_joins_to_the_whole_answer_and_has_usage(litellm, ask):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_required_tool_call_works_whole_and_streamed(litellm, ask):
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 160}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = ask(messages=messages, **fields).choices[0]
    (call, *_) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    chunks = list(ask(messages=messages, stream=True, **fields))
    (streamed, *_) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.name == "get_weather"
    assert json.loads(streamed.function.arguments)["city"] in ("Paris", "Rome")


def test_json_schema_response_format_is_followed(ask):
    schema = WEATHER["function"]["parameters"]
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    answer = ask(response_format=format, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_a_context_overflow_raises_litellms_context_window_error(litellm, ask):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=[{"role": "user", "content": "word " * 9000}])


def test_invalid_requests_raise_litellms_typed_errors(litellm, ask, server):
    with pytest.raises(litellm.BadRequestError):
        ask(logprobs=True, top_logprobs=50)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="hosted_vllm/nobody/knows-this",
            api_base=f"{server.url}/v1",
            messages=QUESTION,
            max_retries=0,
        )


@pytest.mark.parametrize("prefix", ["hosted_vllm", "openai"])
def test_embedding_returns_a_vector_for_each_input(litellm, prefix, server):
    answer = litellm.embedding(
        model=f"{prefix}/{server.model}",
        api_base=f"{server.url}/v1",
        api_key="unused",
        input=["one text", "another"],
        max_retries=0,
    )
    assert [entry["index"] for entry in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens > 0
