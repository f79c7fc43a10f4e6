"""The table of request parameters: whose parameter each is, and what this server does with it.

`reading.py` reads request bodies by this table, so the table can't differ from what happens. The
documentation and `/v1/capabilities` are made from it.

A parameter acts on the endpoints whose body has a field of its name. On other endpoints, it is
converted to other parameters, or causes a warning, or is refused, as its row says.
"""

from dataclasses import dataclass
from typing import Any

from engine.servers.schema.dialects import conversions as by
from engine.servers.schema.dialects.conversions import Convert

DIALECTS = {
    "openai": "OpenAI",
    "vllm": "vLLM",
    "llamacpp": "llama.cpp",
    "sglang": "SGLang",
    "ollama": "Ollama",
    "openrouter": "OpenRouter",
    "mistral": "Mistral",
    "huggingface": "Text Generation Inference",
}
_ALL = " ".join(DIALECTS)
# What the own API of another server uses if neither the request nor the model's preset sets these.
DEFAULTS: dict[str, dict[str, float]] = {
    "llamacpp": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "ollama": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "huggingface": {"temperature": 0.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A request parameter of one or more servers."""

    name: str
    dialects: tuple[str, ...]  # keys of `DIALECTS`
    note: str  # what it does, if that needs to be said
    # Values that ask for nothing, besides null. They are accepted even if the parameter is not
    # supported, because SDKs often send such values.
    off: tuple[Any, ...] = ()
    convert: Convert | None = None
    target: str = ""  # the parameter that the value is converted to
    warning: str = ""  # what the client is told, because the parameter has no effect
    instead: str = "leave it out"  # what an error tells the client to do


def _rows(names: str, dialects: str, note: str, *off: Any, **rule: Any) -> list[Parameter]:
    """A row for each of `names`. Parameters that act have a note."""
    if "target" in rule:
        rule.setdefault("convert", by.renamed(rule["target"]))
    used_by = tuple(dialects.split())
    return [
        Parameter(name=each, dialects=used_by, note=note, off=off, **rule) for each in names.split()
    ]


_PROMPTS = [
    *_rows("model", _ALL, "may be left out if only one model is served"),
    *_rows("messages", _ALL, "the conversation", instead="send prompt"),
    *_rows("prompt", _ALL, "the text to continue", instead="send messages"),
    *_rows("suffix", "openai vllm sglang ollama mistral", "the text after the gap to fill", ""),
    *_rows("echo", "openai vllm llamacpp sglang", "the answer starts with the prompt", False),
    *_rows("truncate_prompt_tokens", "vllm", "keeps the end of a prompt that is too long"),
    *_rows("truncation_side", "vllm", "which end of a prompt is cut off", "left"),
    *_rows("parse_special", "llamacpp", "names of control tokens become these tokens"),
    *_rows("add_special_tokens", "vllm", "whether a BOS is added to the prompt", True),
    *_rows("add_generation_prompt", "vllm llamacpp", "whether the prompt starts an answer", True),
    *_rows("continue_final_message", "vllm llamacpp sglang", "continues the last message", False),
    *_rows("chat_template_kwargs", "vllm llamacpp sglang", "options of the chat template", {}),
    *_rows("documents", "vllm", "documents for the chat template", []),
    *_rows("tools", _ALL, "the functions that the model may call", []),
    *_rows("tool_choice", _ALL, "whether the model must call a tool", "none", "auto"),
    *_rows("parallel_tool_calls", _ALL, "whether an answer may have several calls", True, False),
    *_rows("parse_tool_calls", "llamacpp", "", True, instead="send tool_choice none"),
    *_rows("functions", "openai", "", [], instead="send tools"),
    *_rows("function_call", "openai", "", "none", instead="send tool_choice"),
    *_rows("chat_template", "vllm llamacpp", "", instead="set it in the server's configuration"),
    *_rows("input_ids", "sglang", "", instead="send them as the prompt of /v1/completions"),
    *_rows("prompt_embeds", "vllm", "", instead="send text or token ids"),
    *_rows("image_data", "llamacpp", "", [], instead="send images in messages"),
    *_rows("mm_processor_kwargs media_io_kwargs", "vllm", "", {}),
    *_rows("web_search_options", "openai", "", instead="offer a tool that searches"),
    *_rows("system", "ollama", "", "", instead="send a system message"),
    *_rows("template", "ollama", "", "", instead="set it in the server's configuration"),
    *_rows("raw", "ollama", "", False, instead="send the prompt to /v1/completions"),
    *_rows("context", "ollama", "", [], instead="send the whole conversation"),
    *_rows("images", "ollama", "", [], instead="send images in messages"),
    *_rows("generation_prompt", "llamacpp", "", "", instead="send continue_final_message"),
    *_rows("truncate", "ollama huggingface", "", False, instead="send truncate_prompt_tokens"),
    *_rows("inputs", "huggingface", "", instead="send prompt"),
    *_rows("transforms plugins models", "openrouter", "", []),
    *_rows("provider route", "openrouter", "", {}, instead="choose a model by its name"),
    *_rows("task", "sglang", ""),
    *_rows("images_config video_config", "sglang", "", {}),
    *_rows("max_dynamic_patch min_dynamic_patch", "sglang", ""),
    *_rows("use_audio_in_video", "sglang", "", False),
    *_rows("prompt_mode", "mistral", "", instead="send reasoning_effort"),
    *_rows("safe_prompt", "mistral", "", False, instead="write it in a system message"),
]
_LENGTHS = [
    *_rows("max_tokens", _ALL, "max length of the answer"),
    *_rows(
        "max_completion_tokens",
        "openai vllm sglang",
        "the newer name of max_tokens",
        target="max_tokens",
    ),
    *_rows(
        "n_predict", "llamacpp", "-1 means no limit", target="max_tokens", convert=by.output_limit
    ),
    *_rows(
        "num_predict",
        "ollama",
        "-1 and -2 mean no limit",
        target="max_tokens",
        convert=by.output_limit,
    ),
    *_rows("max_new_tokens", "sglang huggingface", "", target="max_tokens"),
    *_rows("min_tokens", "vllm sglang", "the answer has at least this many tokens", 0),
    *_rows("min_new_tokens", "sglang", "", 0, target="min_tokens"),
    *_rows("stop", _ALL, "strings that end the answer"),
    *_rows("stop_token_ids", "vllm sglang", "tokens that end the answer", []),
    *_rows("stop_regex", "sglang", "regular expressions that end the answer", []),
    *_rows("include_stop_str_in_output", "vllm", "keeps the stop string", False),
    *_rows("no_stop_trim", "sglang", "", False, target="include_stop_str_in_output"),
    *_rows("ignore_eos", "vllm llamacpp sglang", "the end token does not end the answer", False),
    *_rows(
        "t_max_predict_ms", "llamacpp", "", 0, -1, instead="set max_tokens, or close the stream"
    ),
    *_rows("n_indent", "llamacpp", "", 0, instead="set stop"),
    *_rows("num_keep", "ollama", "", warning="a full context is never shifted"),
    *_rows(
        "n_keep n_discard",
        "llamacpp",
        "",
        0,
        -1,
        instead="set truncate_prompt_tokens; a full context is never shifted",
    ),
    *_rows("shift", "ollama", "", False, instead="set max_tokens; a full context is never shifted"),
    *_rows("num_ctx", "ollama", "", warning="the context length is set when the model is loaded"),
]
_SAMPLING = [
    *_rows("temperature top_p", _ALL, "how a token is sampled"),
    *_rows("do_sample", "huggingface", "", False, instead="send temperature"),
    *_rows("watermark", "huggingface", "", False),
    *_rows("top_k", "vllm llamacpp sglang ollama openrouter huggingface", "how a token is sampled"),
    *_rows("min_p", "vllm llamacpp sglang ollama openrouter", "how a token is sampled"),
    *_rows("presence_penalty frequency_penalty", _ALL, "a penalty for repeated tokens"),
    *_rows(
        "repetition_penalty", "vllm sglang openrouter huggingface", "a penalty for repeated tokens"
    ),
    *_rows("repeat_penalty", "llamacpp ollama", "", target="repetition_penalty"),
    *_rows("repeat_last_n", "llamacpp ollama", "the penalties see this many tokens"),
    *_rows("seed", _ALL, "the same seed gives the same answer"),
    *_rows("random_seed", "mistral", "", target="seed"),
    *_rows("n", "openai vllm sglang mistral", "number of answers"),
    *_rows("n_cmpl", "llamacpp", "", target="n"),
    *_rows("best_of", "openai vllm sglang", "number of candidates, of which the best is sent", 1),
    *_rows("use_beam_search", "vllm", "beam search", False),
    *_rows("length_penalty", "vllm", "prefers long or short beams", 1, 1.0),
    *_rows("early_stopping", "vllm", "ends when enough beams have ended", False),
    *_rows("logit_bias", "openai vllm llamacpp sglang", "added to the logits of tokens"),
    *_rows("allowed_token_ids", "vllm", "the only tokens that may be sampled", []),
    *_rows("bad_words", "vllm", "texts that are never written", []),
    *_rows("typical_p", "llamacpp ollama huggingface", "locally typical sampling", 1, 1.0),
    *_rows("typical", "ollama", "", 1, 1.0, target="typical_p"),
    *_rows(
        "top_n_sigma", "llamacpp", "keeps tokens with a logit near the highest", -1, -1.0, 0, 0.0
    ),
    *_rows(
        "xtc_probability xtc_threshold",
        "llamacpp",
        "XTC: leaves out the likeliest tokens at times",
        0,
        0.0,
    ),
    *_rows("dry_multiplier", "llamacpp", "a penalty for repeated sequences", 0, 0.0),
    *_rows(
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        "llamacpp",
        "an option of dry_multiplier",
    ),
    *_rows("mirostat", "llamacpp ollama", "keeps the perplexity of the text near a target", 0),
    *_rows("mirostat_tau mirostat_eta", "llamacpp ollama", "an option of mirostat"),
    *_rows("dynatemp_range", "llamacpp", "a temperature that follows the entropy", 0, 0.0),
    *_rows("dynatemp_exponent", "llamacpp", "an option of dynatemp_range"),
    *_rows("min_keep", "llamacpp", "samplers keep at least this many tokens", 0),
    *_rows("samplers", "llamacpp", "the order of samplers; one that is not listed is off"),
    *_rows("top_a", "openrouter", "", 0, 0.0, instead="use min_p"),
    *_rows("tfs_z", "llamacpp ollama", "", 1, 1.0, instead="use min_p or typical_p"),
    *_rows("adaptive_target adaptive_decay", "llamacpp", "", instead="use mirostat"),
    *_rows("penalize_nl", "llamacpp", "", False, instead="use logit_bias"),
    *_rows(
        "penalize_newline", "ollama", "", True, warning="line breaks are penalized like all tokens"
    ),
    *_rows("logits_processors", "vllm", "", [], instead="use logit_bias"),
    *_rows("custom_logit_processor", "sglang", "", instead="use logit_bias"),
    *_rows("custom_params", "sglang", "", {}),
    *_rows("vllm_xargs", "vllm", "", {}),
    *_rows("repetition_detection", "vllm", "", instead="use dry_multiplier"),
    *_rows("backend_sampling", "llamacpp", "", warning="the server chooses where it samples"),
    *_rows(
        "prediction",
        "openai",
        "the expected answer; if it is right, the native backend answers faster",
    ),
    *_rows("interp", "", "reads and changes activations; see interpretability.md"),
]
_GRAMMARS = [
    *_rows("response_format", _ALL, "the form of the answer", {"type": "text"}),
    *_rows("structured_outputs", "vllm", "a schema, regex, grammar or list of choices", {}),
    *_rows(
        "guided_json guided_regex guided_choice guided_grammar",
        "vllm",
        "older names of structured_outputs",
    ),
    *_rows(
        "guided_decoding_backend",
        "vllm",
        "",
        *("auto", "guidance"),
        warning="llguidance follows every schema and grammar",
    ),
    *_rows("guided_whitespace_pattern", "vllm", "", instead="write it into a guided_grammar"),
    *_rows(
        "grammar", "llamacpp", "", "", target="structured_outputs", convert=by.grammar("grammar")
    ),
    *_rows(
        "json_schema",
        "llamacpp sglang",
        "",
        target="structured_outputs",
        convert=by.grammar("json"),
    ),
    *_rows("regex", "sglang", "", target="structured_outputs", convert=by.grammar("regex")),
    *_rows("ebnf", "sglang", "", target="structured_outputs", convert=by.grammar("grammar")),
    *_rows("format", "ollama", "", "", target="structured_outputs", convert=by.ollama_format),
    *_rows("grammar_lazy", "llamacpp", "", False, instead="offer tools"),
    *_rows("grammar_triggers preserved_tokens", "llamacpp", "", [], instead="offer tools"),
]
_ANSWERS = [
    *_rows("stream", _ALL, "server-sent events"),
    *_rows("stream_options", "openai vllm llamacpp sglang", "when the usage is sent"),
    *_rows("stream_interval", "vllm", "", 1, warning="every token is sent at once"),
    *_rows("sse_ping_interval", "llamacpp", "", warning="the server sets the interval"),
    *_rows("logprobs", "openai vllm llamacpp sglang ollama", "logprobs of the tokens"),
    *_rows("top_logprobs", "openai vllm llamacpp sglang ollama", "number of alternatives", 0),
    *_rows("n_probs", "llamacpp", "", target="logprobs", convert=by.num_logprobs),
    *_rows("post_sampling_probs", "llamacpp", "", False, instead="send logprobs"),
    *_rows("prompt_logprobs", "vllm", "logprobs of the prompt's tokens"),
    *_rows("logprob_token_ids", "vllm", "the alternatives are these tokens", []),
    *_rows("return_token_ids", "vllm sglang", "the answer has token ids", False),
    *_rows("return_tokens", "llamacpp", "", False, target="return_token_ids"),
    *_rows("return_tokens_as_token_ids", "vllm", "tokens of logprobs are named by ids", False),
    *_rows(
        "return_token_offsets return_prompt_text return_assistant_tokens_mask",
        "vllm",
        "",
        False,
        instead="send return_token_ids",
    ),
    *_rows("skip_special_tokens", "vllm sglang", "control tokens are not in the text", True),
    *_rows("spaces_between_special_tokens detokenize", "vllm", "", True),
    *_rows("timings_per_token", "llamacpp", "the answer, or each chunk, has timings", False),
    *_rows("return_progress", "llamacpp", "chunks tell how much of the prompt is done", False),
    *_rows("response_fields", "llamacpp", "", [], instead="pick fields from the whole answer"),
    *_rows("details decoder_input_details", "huggingface", "", False, instead="send logprobs"),
    *_rows("top_n_tokens", "huggingface", "", 0, instead="send top_logprobs"),
    *_rows("return_full_text", "huggingface", "", False, instead="send echo"),
    *_rows(
        "verbose",
        "llamacpp",
        "the answer has its prompt, as `__verbose`",
        False,
        instead="send it to /v1/chat/completions",
    ),
    *_rows(
        "return_hidden_states return_routed_experts return_cached_tokens_details"
        " return_spec_tokens_details return_sampling_mask return_meta_info",
        "sglang",
        "",
        False,
    ),
    *_rows("return_prompt_token_ids", "sglang", "", False, instead="send return_token_ids"),
    *_rows("routed_experts_prompt_start routed_experts_start_len", "vllm sglang", "", 0),
    *_rows("usage", "openrouter", "", warning="every answer has its usage"),
    *_rows("modalities", "openai", "", ["text"], instead="ask for text"),
    *_rows("audio", "openai", "", instead="ask for text"),
]
_REASONING = [
    *_rows("reasoning_effort", "openai vllm llamacpp sglang", "how long the model thinks"),
    *_rows("enable_thinking", "vllm sglang", "turns thinking on or off"),
    *_rows("think", "ollama", "", target="enable_thinking", convert=by.think),
    *_rows("thinking", "openai", "", target="enable_thinking", convert=by.thinking),
    *_rows(
        "reasoning",
        "openai openrouter",
        "its keys effort, enabled and exclude are followed",
        {},
        target="reasoning_effort",
        convert=by.reasoning,
    ),
    *_rows("include_reasoning", "vllm openrouter", "whether the reasoning is sent", True),
    *_rows("separate_reasoning", "sglang", "", True, instead="join the two texts"),
    *_rows("stream_reasoning", "sglang", "", True, instead="send include_reasoning false"),
    *_rows("reasoning_format", "llamacpp", "", "auto", "deepseek", instead="join the two texts"),
    *_rows(
        "thinking_budget thinking_token_budget thinking_budget_tokens reasoning_budget_tokens",
        "vllm llamacpp openrouter",
        "",
        -1,
        instead="send reasoning_effort, or max_tokens for the whole answer",
    ),
    *_rows("thinking_forced_open", "llamacpp", "", False, instead="send enable_thinking"),
    *_rows("reasoning_control", "llamacpp", "", False, instead="send reasoning_effort"),
    *_rows(
        "reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tags",
        "llamacpp",
        "",
        *("", []),
        instead="send reasoning_effort",
    ),
    *_rows("chat_format chat_parser", "llamacpp", "", warning="the model's own format is used"),
    *_rows("reasoning_summary", "openai", "", warning="the whole reasoning is sent"),
    *_rows("verbosity", "openai", "", warning="can't be set for this model"),
]
_SERVING = [
    *_rows("priority", "vllm sglang", "requests with a lower number run first"),
    *_rows("user safety_identifier", "openai", "a hash of it is in the request log"),
    *_rows("metadata", "openai", "labels that are logged and returned"),
    *_rows("store", "openai", "whether the answer is stored", False),
    *_rows("background", "openai", "", False, instead="send it to /v1/responses"),
    *_rows("cache_salt", "vllm sglang", "only requests with the same salt share cached prefixes"),
    *_rows("extra_key", "sglang", "", target="cache_salt"),
    *_rows("cache_prompt", "llamacpp", "false computes the whole prompt, without the cache"),
    *_rows("prompt_cache_key", "openai", "", warning="is not needed, every prefix is cached"),
    *_rows(
        "prompt_cache_retention",
        "openai",
        "",
        *("in-memory", "in_memory"),
        warning="prefixes stay cached as long as there is room",
    ),
    *_rows("prompt_cache_options", "openai", "", {"mode": "implicit"}),
    *_rows("n_cache_reuse", "llamacpp", "", 0, instead="send prompts with the same beginning"),
    *_rows("id_slot", "llamacpp", "a router sends requests of one slot to one backend", -1),
    *_rows("session_id", "vllm sglang", "", target="prompt_cache_key"),
    *_rows("session_params", "sglang", "", {}, instead="send the whole conversation"),
    *_rows("keep_alive", "ollama", "", warning="a model stays loaded until it is unloaded"),
    *_rows("sampling_params", "sglang", "each is read as a parameter", {}, convert=by.options),
    *_rows("options", "ollama", "each option is read as a parameter", {}, convert=by.options),
    *_rows("parameters", "huggingface", "each is read as a parameter", {}, convert=by.options),
    *_rows("rid request_id", "vllm sglang", "", instead="send the header X-Request-Id"),
    *_rows("service_tier", "openai", "", "auto", "default", instead="send priority"),
    *_rows("moderation", "openai", ""),
    *_rows(
        "lora lora_path", "llamacpp sglang", "", [], instead="send the adapter's name as the model"
    ),
    *_rows("adapter_id", "huggingface", "", instead="send the adapter's name as the model"),
    *_rows(
        "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank"
        " data_parallel_rank",
        "sglang",
        "",
        instead="leave it out; this server routes requests itself",
    ),
    *_rows("custom_labels", "sglang", "", {}, instead="send metadata"),
    *_rows(
        "speculative.n_max speculative.n_min speculative.p_min speculative.type",
        "llamacpp",
        "",
        warning="the server sets it; it does not change the answer",
    ),
    *_rows("kv_transfer_params ec_transfer_params", "vllm", "", {}),
    *_rows(
        "num_thread num_batch num_gpu main_gpu draft_num_predict",
        "ollama",
        "",
        warning="is set when the server starts",
    ),
    *_rows("use_mmap f16_kv", "ollama", "", True, warning="is set when the server starts"),
    *_rows(
        "numa low_vram use_mlock logits_all vocab_only embedding_only",
        "ollama",
        "",
        False,
        warning="is set when the server starts",
    ),
]
PARAMETERS = {
    word.name: word
    for word in (
        *_PROMPTS,
        *_LENGTHS,
        *_SAMPLING,
        *_GRAMMARS,
        *_ANSWERS,
        *_REASONING,
        *_SERVING,
    )
}
