"""What every parameter does that is no number, at the endpoints that other APIs share fields with.

`tests/unit/servers/test_server_dialects.py` has examples of the parameters of chats, completions
and `/generate`. Here are those of all other endpoints, and what all have in common.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.core.interfaces.request import UNSHARED
from tests.support.files.dialect_examples import ACTS, GRAMMAR, SCHEMA, TOOL
from tests.tables.parameters.observed import PRESET_MODEL

REGEX = {"regex": "é+"}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}


@dataclass(frozen=True)
class Effect:
    value: Any
    # What is seen then, by its place: `params.seed`, `context.salt`, `answer.choices.0.text`. A
    # function is a check. Empty: something is seen that is not seen without the parameter.
    seen: dict[str, Any] = field(default_factory=dict)
    needs: dict[str, Any] = field(default_factory=dict)  # other parameters that this one needs


def acts(name: str) -> Effect:
    """The example of chats."""
    found = ACTS[name]
    found = next(iter(found.values())) if isinstance(found, dict) and _is_by_path(found) else found
    value, needs = found if isinstance(found, tuple) else (found, {})
    return Effect(value, needs=next(iter(needs.values())) if _is_by_path(needs) else needs)


def _is_by_path(value: dict[str, Any]) -> bool:
    return any(each.startswith("/") for each in value)


def warns(value: Any) -> Effect:
    return Effect(value, {"warnings": bool})


def grammar(value: Any, kind: str) -> Effect:
    return Effect(value, {"context.grammar.kind": kind})


def params(value: Any, name: str, seen: Any, **needs: Any) -> Effect:
    return Effect(value, {f"params.{name}": seen}, needs)


def is_there(value: Any) -> bool:
    return bool(value)


# The same at every endpoint that has the field.
SHARED = {
    "stop": params("énd", "stop", ("énd",)),
    "stop_token_ids": params([5], "stop_token_ids", (5,)),
    "stop_regex": params(["é.m"], "stop_regex", ("é.m",)),
    "ignore_eos": params(True, "ignore_eos", True),
    "allowed_token_ids": params([1, 2], "allowed_token_ids", (1, 2)),
    "bad_words": params(["über"], "bad_words", ("über",)),
    "logit_bias": params([[7, -2.5]], "logit_bias", {7: -2.5}),
    "dry_sequence_breakers": params(["é"], "dry_sequence_breakers", ("é",)),
    "samplers": params(["top_k"], "samplers", ("top_k",)),
    "cache_prompt": Effect(False, {"context.salt": lambda salt: salt.startswith(UNSHARED)}),
    "cache_salt": Effect("é", {"context.salt": lambda salt: len(salt) == 64}),
    "user": Effect("é", {"record.user_hash": is_there, "context.session": is_there}),
    "safety_identifier": Effect("é", {"record.user_hash": is_there}),
    "metadata": Effect({"a": "é"}, {"record.metadata": {"a": "é"}}),
    "truncate_prompt_tokens": Effect(3, {"context.truncate_prompt_tokens": 3}),
    "truncation_side": Effect(
        "right", {"context.truncation_side": "right"}, {"truncate_prompt_tokens": 3}
    ),
    "id_slot": Effect(3, {"context.session": is_there}),
    "structured_outputs": grammar(REGEX, "regex"),
    "response_format": grammar({"type": "json_object"}, "json_object"),
    "guided_json": grammar(SCHEMA, "json_schema"),
    "guided_regex": grammar("é+", "regex"),
    "guided_choice": grammar(["é"], "choice"),
    "guided_grammar": grammar(GRAMMAR, "grammar"),
    "prediction": Effect({"type": "content", "content": "é"}, {"context.expected": "é"}),
    "prompt_cache_key": Effect("é", {"warnings": is_there, "context.session": is_there}),
    "parse_special": Effect(True, {"request.parse_special": True}),
    "add_special_tokens": Effect(False, {"request.add_special_tokens": False}),
    "model": Effect(PRESET_MODEL, {"context.model": PRESET_MODEL}),
    "stream": Effect(True, {"type": lambda kind: kind != "application/json"}),
    "timings_per_token": Effect(True, {"answer.timings": is_there}),
    "return_progress": warns(True),
    "stream_options": Effect({"include_usage": True}, needs={"stream": True}),
    "tools": Effect([TOOL], {"request.tools": is_there}),
    "tool_choice": Effect("required", {"request.tool_choice.mode": "required"}, {"tools": [TOOL]}),
    "parallel_tool_calls": Effect(False, {"request.parallel_tool_calls": False}, {"tools": [TOOL]}),
}
PROMPTS = {
    "prompt": Effect("é", {"request.prompt": "é"}),
    "suffix": Effect("é", {"request.suffix": "é"}),
}
FIM = PROMPTS
SGLANG = {
    "text": Effect("é", {"request.prompt": "é"}),
    "input_ids": Effect([1, 2], {"request.prompt": (1, 2)}, {"text": None}),
    "return_logprob": params(True, "logprobs", 0),
    "top_logprobs_num": params(3, "logprobs", 3, return_logprob=True),
    "logprob_start_len": params(0, "score_prompt", True, return_logprob=True),
    "return_text_in_logprobs": Effect(
        True,
        {"answer.meta_info.output_token_logprobs.0.2": "Hello"},
        {"return_logprob": True},
    ),
    "rid": Effect("r1", {"answer.meta_info.id": "r1"}),
    "stream": Effect(True),
}
HUGGINGFACE = {
    "inputs": Effect("é", {"request.prompt": "é"}),
    "do_sample": params(None, "temperature", 0.0),
    "details": Effect(True, {"answer.details.generated_tokens": is_there}),
    "decoder_input_details": params(True, "score_prompt", True, details=True),
    "top_n_tokens": params(3, "logprobs", 3, details=True),
    "return_full_text": Effect(True, {"answer.generated_text": "one twoHello from a fake model."}),
    "truncate": Effect(3, {"context.truncate_prompt_tokens": 3}),
    "grammar": grammar({"type": "regex", "value": "é+"}, "regex"),
}
RESPONSES = {
    "input": Effect("é", {"request.messages.0.content": "é"}),
    "instructions": Effect("é", {"request.messages.0.content": "é"}),
    "background": Effect(True, {"answer.background": True}, {"store": True}),
    "include": params(["message.output_text.logprobs"], "logprobs", 0),
    "top_logprobs": params(3, "logprobs", 3),
    "store": Effect(True, {"answer.store": True}),
    "reasoning": Effect(
        {"effort": "none"}, {"request.template_options": {"enable_thinking": False}}
    ),
    "text": grammar({"format": {"type": "json_object"}}, "json_object"),
    "tools": Effect([FLAT_TOOL], {"request.tools": is_there}),
    "tool_choice": Effect(
        "required", {"request.tool_choice.mode": "required"}, {"tools": [FLAT_TOOL]}
    ),
    "parallel_tool_calls": Effect(
        False, {"request.parallel_tool_calls": False}, {"tools": [FLAT_TOOL]}
    ),
    "client_metadata": warns({"a": "é"}),
    "max_tool_calls": Effect(3, {"answer.max_tool_calls": 3}),
    "stream_options": Effect({}, {}, {"stream": True}),
    "metadata": Effect({"a": "é"}, {"answer.metadata": {"a": "é"}}),
    "previous_response_id": Effect("resp_absent", {"status": 404}),
    "conversation": Effect("conv_absent", {"status": 404}),
}
MESSAGES = {
    "messages": Effect([{"role": "user", "content": "é"}], {"request.messages.0.content": "é"}),
    "system": Effect("é", {"request.messages.0.content": "é"}),
    "stop_sequences": params(["énd"], "stop", ("énd",)),
    "metadata": Effect({"user_id": "é"}, {"record.user_hash": is_there}),
    "output_config": grammar({"format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
    "output_format": grammar({"type": "json_schema", "schema": SCHEMA}, "json_schema"),
    "thinking": Effect(
        {"type": "disabled"}, {"request.template_options": {"enable_thinking": False}}
    ),
    "tools": Effect([ANTHROPIC_TOOL], {"request.tools": is_there}),
    "tool_choice": Effect(
        {"type": "any"}, {"request.tool_choice.mode": "required"}, {"tools": [ANTHROPIC_TOOL]}
    ),
    "cache_control": warns({"type": "ephemeral", "ttl": "1h"}),
    "service_tier": Effect("auto", {"status": 200}),
    "speed": Effect("standard", {"status": 200}),
}
NATIVE = {
    "n_probs": params(3, "logprobs", 3),
    "return_tokens": Effect(True, {"answer.tokens": [7]}),
    "response_fields": Effect(["content"], {"answer": {"content": "Hello from a fake model."}}),
    "return_progress": Effect(True, needs={"stream": True}),
    "timings_per_token": Effect(True, needs={"stream": True}),
    "model": SHARED["model"],
}
LLAMACPP = NATIVE | {"prompt": Effect("é", {"request.prompt": (256, 195, 169)})}
INFILL = NATIVE | {
    "input_prefix": Effect("é", {"request.prompt": "é"}),
    "input_suffix": Effect("é", {"request.suffix": "é"}),
    "input_extra": Effect(
        [{"filename": "é", "text": "ü"}], {"request.prompt": lambda text: text.startswith("é\nü\n")}
    ),
    "prompt": Effect("é", {"request.prompt": "oneé"}),
}
OLLAMA = {
    "format": grammar("json", "json_object"),
    "think": Effect(False, {"request.template_options": {"enable_thinking": False}}),
    "keep_alive": warns(7),
    "logprobs": params(True, "logprobs", 0),
    "top_logprobs": params(3, "logprobs", 3, logprobs=True),
    "truncate": Effect(True, {"context.truncate_prompt_tokens": -1}),
    "shift": warns(True),
}
OLLAMA_CHAT = OLLAMA | {
    "messages": Effect([{"role": "user", "content": "é"}], {"request.messages.0.content": "é"}),
}
OLLAMA_GENERATE = OLLAMA | {
    "prompt": Effect("é", {"request.messages.0.content": "é"}),
    "suffix": Effect("é", {"request.suffix": "é"}),
    "system": Effect("é", {"request.messages.0.content": "é"}),
    "raw": Effect(True, {"request.prompt": "one two"}),
    "images": Effect(["aGk="], {"status": 400}),
}
KSERVE = {
    "text_input": Effect("é", {"request.prompt": "é"}),
    "id": Effect("é", {"answer.id": "é"}),
    "exclude_input_in_output": Effect(False, {"request.echo": True}),
    "return_finish_reason": Effect(True, {"answer.finish_reason": is_there}),
    "return_num_input_tokens": Effect(True, {"answer.num_input_tokens": is_there}),
    "return_num_output_tokens": Effect(True, {"answer.num_output_tokens": is_there}),
    "stream": Effect(True, {"status": 400}),
}
_OF_CHATS = (
    *("add_generation_prompt", "chat_template_kwargs", "documents", "enable_thinking"),
    *("logprob_token_ids", "logprobs", "reasoning_effort", "return_token_ids"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "top_logprobs", "include_reasoning"),
)
BATCH = {name: acts(name) for name in _OF_CHATS} | {
    "messages": Effect([[{"role": "user", "content": "é"}]], {"request.messages.0.content": "é"}),
    "continue_final_message": Effect(
        True,
        {"request.continue_final_message": True},
        {"messages": [[{"role": "assistant", "content": "é"}]]},
    ),
    "verbosity": warns("low"),
    **{
        name: Effect(value, {"status": 400})
        for name, value in (
            *(("echo", True), ("include_stop_str_in_output", True), ("interp", {"capture": []})),
            ("verbose", True),
            *(("store", True), ("prompt_logprobs", 1), ("use_beam_search", True)),
            *(("best_of", 2), ("length_penalty", 2.0), ("early_stopping", True)),
            *(("stream", True), ("tools", [TOOL]), ("stream_options", {"include_usage": True})),
            *(("tool_choice", "required"),),
        )
    },
    "parallel_tool_calls": Effect(False, {"request.parallel_tool_calls": False}),
}
OWN = {
    "fim": FIM,
    "sglang": SGLANG,
    "huggingface": HUGGINGFACE,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "llamacpp": LLAMACPP,
    "infill": INFILL,
    "ollama chat": OLLAMA_CHAT,
    "ollama generate": OLLAMA_GENERATE,
    "kserve": KSERVE,
    "batch chat": BATCH,
}
