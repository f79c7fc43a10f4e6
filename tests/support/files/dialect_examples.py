"""Examples of request parameters, for the test that sends every row of the table of dialects."""

from typing import Any

from engine.core.interfaces.backend import FinishEvent, TextEvent
from engine.servers.capabilities import TRANSLATING
from tests.support.fakes.fake_backend import Script, reasoning_script

CHAT, COMPLETIONS, GENERATE = TRANSLATING
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "say hello to me"}]},
    COMPLETIONS: {"prompt": "one two"},
    # A submission that is not streamed answers before it is done.
    GENERATE: {"prompt": "one two", "stream": True},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMAR = 'root ::= "a" | "b"'
ANSWERED = [*BASE[CHAT]["messages"], {"role": "assistant", "content": "hello"}]
WITH_LOGPROBS = {CHAT: {"logprobs": True}, COMPLETIONS: {"logprobs": 1}}
WITH_BEAMS = {"use_beam_search": True, "max_tokens": 4}
# A value that changes something, for each parameter that acts. In a pair, the second part has other
# parameters that are needed for that.
ACTS: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "allowed_token_ids": [1, 2],
    "bad_words": ["hello"],
    "best_of": {CHAT: (3, WITH_BEAMS), COMPLETIONS: 3},
    "cache_prompt": False,
    "cache_salt": "s",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": (True, {"messages": ANSWERED}),
    "documents": [{"title": "a", "text": "b"}],
    "dry_allowed_length": (5, {"dry_multiplier": 1.0}),
    "dry_base": (2.0, {"dry_multiplier": 1.0}),
    "dry_multiplier": 1.0,
    "dry_penalty_last_n": (64, {"dry_multiplier": 1.0}),
    "dry_sequence_breakers": (["x"], {"dry_multiplier": 1.0}),
    "dynatemp_exponent": (2.0, {"dynatemp_range": 0.5}),
    "dynatemp_range": 0.5,
    "early_stopping": (True, WITH_BEAMS),
    "echo": {CHAT: (True, {"messages": ANSWERED}), COMPLETIONS: True},
    "enable_thinking": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a"],
    "guided_grammar": GRAMMAR,
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "id_slot": 3,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "length_penalty": (2.0, WITH_BEAMS),
    "logit_bias": [["hello", False], [7, 2.5]],
    "logprob_token_ids": ([5], WITH_LOGPROBS),
    "logprobs": {CHAT: True, COMPLETIONS: 2, GENERATE: 2},
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "another one"}],
    "metadata": {"a": "b"},
    "min_keep": 3,
    "min_p": 0.5,
    "min_tokens": 3,
    "mirostat": 2,
    "mirostat_eta": (0.5, {"mirostat": 2}),
    "mirostat_tau": (2.0, {"mirostat": 2}),
    "model": "another",
    "n": 2,
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "parse_special": True,
    "interp": {"capture": [{"site": "hook_embed"}]},
    "prediction": {"type": "content", "content": "expected"},
    "presence_penalty": 0.5,
    "priority": 5,
    "prompt": "another one",
    "prompt_logprobs": 1,
    "reasoning_effort": "none",
    "repeat_last_n": 5,
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object", "schema": SCHEMA},
    "return_progress": (True, {"stream": True}),
    "return_token_ids": True,
    "return_tokens_as_token_ids": (True, WITH_LOGPROBS),
    "safety_identifier": "me",
    "samplers": ["top_k"],
    "seed": 5,
    "skip_special_tokens": False,
    "stop": ["from"],
    "stop_regex": ["fr.m"],
    "stop_token_ids": [5],
    "store": True,
    "verbose": True,
    "stream": {CHAT: True, COMPLETIONS: True, GENERATE: False},
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "structured_outputs": {"regex": "a+"},
    "suffix": "three",
    "temperature": 0.5,
    "timings_per_token": True,
    "tool_choice": ("required", {"tools": [TOOL]}),
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": (2, {"logprobs": True}),
    "top_n_sigma": 1.0,
    "top_p": 0.5,
    "truncate_prompt_tokens": 1,
    "truncation_side": ("right", {"truncate_prompt_tokens": 1}),
    "typical_p": 0.5,
    "use_beam_search": (True, {"max_tokens": 4}),
    "user": "me",
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}
# For each parameter that is translated: a value, and the parameters with the same effect.
SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "ebnf": (GRAMMAR, {"structured_outputs": {"grammar": GRAMMAR}}),
    "extra_key": ("s", {"cache_salt": "s"}),
    "format": (SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
    "grammar": (GRAMMAR, {"structured_outputs": {"grammar": GRAMMAR}}),
    "json_schema": (SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
    "max_completion_tokens": (3, {"max_tokens": 3}),
    "max_new_tokens": (3, {"max_tokens": 3}),
    "min_new_tokens": (3, {"min_tokens": 3}),
    "n_cmpl": (2, {"n": 2}),
    "n_predict": (3, {"max_tokens": 3}),
    "n_probs": (2, {}),
    "no_stop_trim": (True, {"include_stop_str_in_output": True}),
    "num_predict": (3, {"max_tokens": 3}),
    "options": (
        {"repeat_penalty": 1.5, "num_predict": 2, "seed": 1},
        {"repetition_penalty": 1.5, "max_tokens": 2, "seed": 1},
    ),
    "random_seed": (5, {"seed": 5}),
    "parameters": ({"max_new_tokens": 2, "seed": 1}, {"max_tokens": 2, "seed": 1}),
    "sampling_params": ({"max_new_tokens": 2, "seed": 1}, {"max_tokens": 2, "seed": 1}),
    "reasoning": ({"effort": "none", "enabled": False}, {"reasoning_effort": "none"}),
    "regex": ("a+", {"structured_outputs": {"regex": "a+"}}),
    "return_tokens": (True, {"return_token_ids": True}),
    "repeat_penalty": (1.5, {"repetition_penalty": 1.5}),
    "session_id": ("k", {"prompt_cache_key": "k"}),
    "think": (False, {"enable_thinking": False}),
    "thinking": ({"type": "disabled"}, {"enable_thinking": False}),
    "typical": (0.5, {"typical_p": 0.5}),
}
WARNED: dict[str, Any] = {"verbosity": "low", "prompt_cache_key": "k"}
# What the backend answers, for parameters that change an answer and not the request.
STOPPED = [TextEvent(0, "hello", 1), FinishEvent(0, "stop", " from")]
SCRIPTS: dict[str, Script] = {
    "include_reasoning": reasoning_script(["hm"], ["yes"]),
    "include_stop_str_in_output": STOPPED,
    "no_stop_trim": STOPPED,
}
