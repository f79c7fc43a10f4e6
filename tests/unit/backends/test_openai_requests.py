"""Requests in every dialect: what can't be said is refused by name, and nothing gets lost."""

from typing import Any

import pytest

from engine.backends.openai.config import parse_endpoint
from engine.backends.openai.dialects import (
    DIALECTS,
    ENGINE,
    LLAMA_SERVER,
    OLLAMA,
    OPENAI,
    SGLANG,
    TGI,
    VLLM,
    Dialect,
)
from engine.backends.openai.requests import BodyBuilder
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    GenerationContext,
    GrammarSpec,
    ToolChoice,
)
from engine.core.interfaces.request import SamplingParams

OTHER_VALUES: dict[str, Any] = {
    "max_tokens": 77,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.5},
    "text_bias": {"x": 1.5},
    "seed": 9,
    "n": 2,
    "stop": ("x",),
    "stop_token_ids": (4,),
    "ignore_eos": True,
    "logprobs": 2,
    "score_prompt": True,
    "prompt_logprobs": 3,
    "logprob_token_ids": (4,),
    "skip_special_tokens": False,
    "allowed_token_ids": (1, 2),
    "bad_words": ("x",),
    "stop_regex": ("x+",),
    "repeat_last_n": 64,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 100,
    "dry_sequence_breakers": ("x",),
    "top_n_sigma": 1.0,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "min_keep": 2,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "samplers": ("top_k", "typical_p"),
}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
SCHEMA = GrammarSpec(kind="json_schema", source='{"type":"object"}', param="guided_json")
REGEX = GrammarSpec(kind="regex", source="a+", param="guided_regex")
CHOICE = GrammarSpec(kind="choice", source='["a.b","c\\"d"]', param="guided_choice")
GRAMMAR = GrammarSpec(kind="grammar", source='root ::= "a"', param="guided_grammar")


def context(**fields: Any) -> GenerationContext:
    params = SamplingParams(**fields.pop("params", {}))
    return GenerationContext(request_id="r", params=params, **fields)


def chat(dialect: Dialect, **fields: Any) -> dict[str, Any]:
    messages = fields.pop("messages", ({"role": "user", "content": "hi"},))
    own = {
        name: fields.pop(name) for name in ("tools", "tool_choice") if name in fields
    } | fields.pop("chat", {})
    request = ChatRequest(context=context(**fields), messages=messages, **own)
    return BodyBuilder(dialect, "m", max_model_len=2048).chat(request)


def complete(dialect: Dialect, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    own = fields.pop("completion", {})
    request = CompletionRequest(context=context(**fields), prompt=prompt, **own)
    return BodyBuilder(dialect, "m", max_model_len=2048).completion(request)


def test_the_parameter_table_covers_every_sampling_parameter() -> None:
    assert OTHER_VALUES.keys() == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_parameter_is_sent_or_refused_by_name_in_every_dialect(
    dialect: Dialect, name: str
) -> None:
    """It changes what is sent, or it is refused by its name."""
    beside = {"score_prompt": True} if name == "prompt_logprobs" else {}
    asked = beside | {name: OTHER_VALUES[name]}
    for build in (chat, complete):
        if name in ("score_prompt", "prompt_logprobs") and build is chat:
            continue  # a completion's alone
        try:
            made = build(dialect, params=asked)
        except InvalidRequestError as error:
            assert error.param in (name, *beside)
        else:
            assert made != build(dialect, params=beside), f"{name} makes no difference"
        assert (name in dialect.lacks) <= (name not in dialect.emulated)


def test_parameters_are_sent_under_each_dialects_names() -> None:
    params = {"max_tokens": 9, "repetition_penalty": 1.2, "seed": 2**40, "logprobs": 0}
    llama = chat(LLAMA_SERVER, params=params)
    assert (llama["repeat_penalty"], llama["repeat_last_n"]) == (1.2, 2048)
    assert "repetition_penalty" not in llama
    assert llama["dry_penalty_last_n"] == 2048, "it refuses -1"
    window = {"repetition_penalty": 1.2, "repeat_last_n": 64}
    assert chat(LLAMA_SERVER, params=window)["repeat_last_n"] == 64
    order = {"samplers": ("top_k", "typical_p")}
    assert chat(LLAMA_SERVER, params=order)["samplers"] == ["top_k", "typ_p"]
    assert chat(ENGINE, params=order)["samplers"] == ["top_k", "typical_p"]
    assert llama["seed"] == 2**40 % 2**31
    largest = {"seed": 2**31 - 1}
    assert chat(LLAMA_SERVER, params=largest)["seed"] == 2**31 - 1
    assert chat(VLLM, priority=-3)["priority"] == -3
    assert llama["top_logprobs"] == 1 and llama["max_tokens"] == 9
    # Its own defaults are others, so that ours are always told.
    assert (llama["top_k"], llama["min_p"], llama["temperature"]) == (0, 0.0, 1.0)
    plain = chat(OPENAI, params={"max_tokens": 9})
    assert plain["max_completion_tokens"] == 9
    assert plain.keys() == {
        *("model", "messages", "stream", "stream_options", "max_completion_tokens")
    }


def test_logit_bias_is_sent_in_each_dialects_form() -> None:
    never = {"logit_bias": {5: float("-inf")}}
    assert chat(VLLM, params=never)["logit_bias"] == {"5": -100.0}
    told = chat(LLAMA_SERVER, params=never | {"text_bias": {"x": 1.5}})["logit_bias"]
    assert told == [[5, False], ["x", 1.5]]


def test_only_greedy_top_k_can_be_emulated() -> None:
    assert chat(OPENAI, params={"top_k": 1, "temperature": 0.7})["temperature"] == 0.0
    assert "top_k" not in chat(OLLAMA, params={"top_k": 40, "temperature": 0.0})
    with pytest.raises(InvalidRequestError, match="top_k"):
        chat(OPENAI, params={"top_k": 40})


def test_stop_strings_beyond_the_dialects_limit_are_not_sent() -> None:
    stops = tuple("abcdef")
    assert chat(OPENAI, params={"stop": stops})["stop"] == list("abcd")
    assert chat(VLLM, params={"stop": stops})["stop"] == list(stops)


@pytest.mark.parametrize(
    "dialect, spec, fields",
    [
        (ENGINE, REGEX, {"structured_outputs": {"regex": "a+"}}),
        (VLLM, CHOICE, {"structured_outputs": {"choice": ["a.b", 'c"d']}}),
        (SGLANG, CHOICE, {"regex": '(a\\.b|c"d)'}),
        (SGLANG, GRAMMAR, {"ebnf": 'root ::= "a"'}),
        (LLAMA_SERVER, CHOICE, {"grammar": 'root ::= "a.b" | "c\\"d"'}),
        (TGI, REGEX, {"response_format": {"type": "regex", "value": "a+"}}),
    ],
)
def test_grammars_are_sent_in_each_dialects_form(
    dialect: Dialect, spec: GrammarSpec, fields: dict[str, Any]
) -> None:
    made = chat(dialect, grammar=spec)
    assert {name: made[name] for name in fields} == fields


def test_grammars_that_a_dialect_lacks_are_refused() -> None:
    for build, dialect, spec in (
        (chat, OPENAI, REGEX),
        (chat, LLAMA_SERVER, REGEX),
        (chat, OLLAMA, CHOICE),
        (complete, OPENAI, SCHEMA),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            build(dialect, grammar=spec)
        assert caught.value.param == spec.param


@pytest.mark.parametrize(
    "dialect, fields, param",
    [
        (LLAMA_SERVER, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (OPENAI, {"chat": {"continue_final_message": True}}, "continue_final_message"),
        (OLLAMA, {"chat": {"add_generation_prompt": False}}, "add_generation_prompt"),
        (TGI, {"chat": {"template_options": {"enable_thinking": False}}}, "chat_template_kwargs"),
        (OLLAMA, {"tools": (TOOL,), "tool_choice": ToolChoice("required")}, "tool_choice"),
        (OLLAMA, {"tools": (TOOL,), "tool_choice": ToolChoice("named", "f")}, "tool_choice"),
        (TGI, {"tools": (TOOL,), "chat": {"parallel_tool_calls": False}}, "parallel_tool_calls"),
        (
            OPENAI,
            {"messages": ({"role": "assistant", "content": "a", "reasoning_content": "b"},)},
            "messages[0].reasoning_content",
        ),
    ],
)
def test_other_parameters_that_a_dialect_lacks_are_refused(
    dialect: Dialect, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(dialect, **fields)
    assert caught.value.param == param and caught.value.error_code == "unsupported_parameter"


def test_tools_and_tool_choice_are_sent_in_each_dialects_form() -> None:
    named = chat(VLLM, tools=(TOOL,), tool_choice=ToolChoice("named", "f"))
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert named["parallel_tool_calls"] is True
    assert named["tools"][0]["function"]["strict"] is True, "vLLM lets any arguments pass otherwise"
    assert "strict" not in TOOL["function"], "the request itself is left alone"
    assert "strict" not in chat(SGLANG, tools=(TOOL,))["tools"][0]["function"]
    assert "tools" not in chat(OLLAMA, tools=(TOOL,), tool_choice=ToolChoice("none"))
    assert chat(ENGINE, tools=(TOOL,), tool_choice=ToolChoice("none"))["tool_choice"] == "none"


def test_tools_without_parameters_get_a_constant_schema_for_vllm() -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}

    def sent(schema: dict[str, Any]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "clock", "parameters": schema}}
        return chat(VLLM, tools=(tool,))["tools"][0]["function"]["parameters"]

    assert sent(empty) == empty | {"const": {}}, "else it may write white space for ever"
    for other in (TOOL["function"]["parameters"], {"type": "object"}, {}):
        assert sent(other) == other


def test_earlier_tool_calls_and_reasoning_are_sent_back_unchanged() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    message = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]}
    (made,) = chat(VLLM, messages=(message,))["messages"]
    assert made["content"] is None and made["reasoning_content"] == "r"
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert message["tool_calls"] == [call], "the request itself is left alone"


def test_completion_bodies_follow_the_dialect() -> None:
    assert complete(VLLM, prompt=(1, 2))["prompt"] == (1, 2)
    assert complete(OLLAMA, completion={"suffix": "s"})["suffix"] == "s"
    scored = complete(VLLM, params={"logprobs": 1, "score_prompt": True})
    assert scored["echo"] is True and scored["stream"] is False and "stream_options" not in scored
    with pytest.raises(InvalidRequestError, match="token ids"):
        complete(OLLAMA, prompt=(1, 2))
    with pytest.raises(InvalidRequestError, match="suffix"):
        complete(VLLM, completion={"suffix": "s"})


def test_tenants_get_separate_cache_salts_where_the_dialect_can() -> None:
    made = [chat(VLLM, salt=salt).get("cache_salt") for salt in ("", "a", "b")]
    assert made[0] is None and len(set(made)) == 3 and "a" not in made
    embed = EmbedRequest(request_id="e", inputs=("x",), salt="a")
    assert BodyBuilder(ENGINE, "m", max_model_len=2048).embedding(embed)["cache_salt"] == made[1]


def test_token_ids_beyond_the_servers_vocabulary_are_refused() -> None:
    builder = BodyBuilder(LLAMA_SERVER, "m", max_model_len=2048, vocab_size=100)
    request = CompletionRequest(context=context(params={"logit_bias": {100: 1.0}}), prompt="a")
    with pytest.raises(InvalidRequestError, match="100 is out of vocabulary") as caught:
        builder.completion(request)
    assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequestError, match="100 is out of vocabulary"):
        builder.completion(CompletionRequest(context=context(), prompt=(5, 100)))


def test_extra_body_fields_are_added_to_every_request() -> None:
    extra = {"provider": {"order": ["x"]}, "model": "not this"}
    builder = BodyBuilder(OPENAI, "m", max_model_len=2048, extra=extra)
    request = ChatRequest(context=context(), messages=({"role": "user", "content": "hi"},))
    made = builder.chat(request)
    assert made["provider"] == {"order": ["x"]} and made["model"] == "m"


@pytest.mark.parametrize(
    "url, host_header, prefix, root",
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000", "/v1", ""),
        ("http://h:80", "h", "/v1", ""),
        ("https://api.example.com/openai/v1/", "api.example.com", "/openai/v1", "/openai"),
        ("http://[::1]:9/api", "[::1]:9", "/api", "/api"),
        ("unix:///run/x.sock", "localhost", "/v1", ""),
    ],
)
def test_base_urls_are_split_into_host_and_prefix(
    url: str, host_header: str, prefix: str, root: str
) -> None:
    endpoint = parse_endpoint(url)
    assert (endpoint.host_header, endpoint.prefix, endpoint.root) == (host_header, prefix, root)


@pytest.mark.parametrize(
    "url",
    ["", "ftp://h", "http://", "unix://x", "http://h:x/v1", "http://h/v1?a=1", "http://h/a b"],
)
def test_malformed_base_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        parse_endpoint(url)
