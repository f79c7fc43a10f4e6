"""LangChain's `ChatOpenAI` and `OpenAIEmbeddings` against `engine serve` on the real model."""

import math
from typing import Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

QUESTION = "Name the capital of France."
KEY = SecretStr("unused")


class Colour(BaseModel):
    """The colour of a thing."""

    name: Literal["red", "green", "blue"]
    dark: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


@pytest.fixture(scope="module")
def chat(server):
    return ChatOpenAI(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key=KEY,
        temperature=0,
        max_retries=0,
        max_tokens=128,
    )


def test_invoke_reports_usage_metadata(chat):
    answer = chat.invoke([SystemMessage("You are a helpful assistant."), HumanMessage(QUESTION)])
    assert "Paris" in answer.content
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_streamed_chunks_add_up_to_one_message_with_usage(chat):
    whole = chat.invoke(QUESTION)
    total = None
    for chunk in chat.stream(QUESTION, stream_usage=True):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert total.response_metadata["finish_reason"] == "stop"


async def test_abatch_answers_several_prompts(chat):
    answers = await chat.abatch([QUESTION, "Say hello."])
    assert "Paris" in answers[0].content and answers[1].content


def test_a_required_tool_is_called_and_answered(chat):
    model = chat.bind_tools([get_weather], tool_choice="required")
    answer = model.invoke("What is the weather in Paris?")
    assert not answer.invalid_tool_calls
    (call, *_) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")
    turns = [
        HumanMessage("What is the weather in Paris?"),
        answer,
        *(ToolMessage(get_weather.invoke(each), tool_call_id=each["id"])
          for each in answer.tool_calls),
    ]  # fmt: skip
    assert isinstance(chat.invoke(turns), AIMessage)


def test_a_streamed_tool_call_joins_to_one_call(chat):
    model = chat.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    total = None
    for chunk in model.stream("What is the weather in Rome?"):
        total = chunk if total is None else total + chunk
    assert not total.invalid_tool_calls
    assert [call["name"] for call in total.tool_calls] == ["get_weather"]
    assert set(total.tool_calls[0]["args"]) == {"city"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance_of_the_model(chat, method):
    model = chat.with_structured_output(Colour, method=method)
    assert isinstance(model.invoke("What colour is grass?"), Colour)


def test_structured_output_includes_the_raw_message(chat):
    model = chat.with_structured_output(Colour, method="json_schema", include_raw=True)
    answer = model.invoke("What colour is the sky?")
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Colour)


def test_logprobs_and_stop_reach_the_server(chat):
    answer = chat.bind(logprobs=True, top_logprobs=2, stop=["Paris"]).invoke(QUESTION)
    assert "Paris" not in answer.content
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_embed_documents_returns_unit_vectors(server):
    embeddings = OpenAIEmbeddings(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key=KEY,
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    one, two = embeddings.embed_documents(["The cat sat on the mat.", "Stock prices fell."])
    assert len(one) == len(two) and one != two
    assert math.isclose(sum(each * each for each in one), 1, abs_tol=1e-2)
    again = embeddings.embed_query("The cat sat on the mat.")
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(one, again, strict=True))


def test_embedding_input_with_token_ids_beyond_the_vocabulary_is_a_bad_request(server):
    """By default LangChain sends ids of OpenAI's vocabulary, of which ours has only some."""
    embeddings = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="Token id"):
        embeddings.embeddings.create(model=server.model, input=[[99_999]])
