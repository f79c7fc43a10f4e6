"""Differences between OpenAI-compatible servers: features that they have, lack, or name
differently. To support another server, add a `Dialect`.

The entries of engine, llama-server (llama.cpp 0.5.0-dev) and vLLM 0.32 were verified with running
servers. Those of SGLang, Ollama, TGI and OpenAI follow their documentation and published source
code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from engine.core.interfaces.request import SAMPLER_FIELDS, SamplingParams

GrammarForm = Literal[
    "response_format",  # OpenAI's object of this name
    "structured_outputs",  # vLLM's and ours: one kind with its value
    "regex",  # a field `regex`; choices become a regular expression
    "ebnf",
    "gbnf",  # llama.cpp's grammar; choices become one
    "json_schema",  # a field that holds the schema itself
    "format_regex",  # TGI's `response_format` of type regex
]
Grammars = Mapping[str, GrammarForm]
Feature = Literal[
    # chat parameters
    "tool_choice",
    "parallel_tool_calls",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template_kwargs",
    "reasoning_content",
    # completion parameters
    "token_ids",
    "suffix",
    "completion_logprobs",
    "add_special_tokens",
    "parse_special",
    # parameters of chats and completions
    "priority",
    "cache_salt",
    "truncate_prompt_tokens",
    # embedding parameters
    "base64",
]
_JSON: Grammars = {"json_object": "response_format", "json_schema": "response_format"}
_ALL_STRUCTURED: Grammars = {
    **_JSON,
    "regex": "structured_outputs",
    "choice": "structured_outputs",
    "grammar": "structured_outputs",
}


@dataclass(frozen=True, kw_only=True)
class TokenApi:
    """Field names of a server's tokenization API."""

    text: str  # field with the text
    special: str | None  # field that says whether to add special tokens such as BOS
    decoded: str  # field with the detokenized text
    # How conversations are tokenized: "messages" sends them to the tokenization API; "template"
    # asks the server to render them first; None means not at all.
    chats: Literal["messages", "template"] | None = None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    name: str
    # (path, key). A server has this dialect if the JSON object at `path`, relative to the server's
    # root, has `key`.
    signature: tuple[str, str] | None = None
    health_path: str | None = None  # relative to the root; None: poll the list of models
    probe_interval_s: float = 5.0
    lacks: frozenset[str] = frozenset()  # unsupported fields of `SamplingParams`
    emulated: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)  # our field name -> the server's
    # Whether to send parameters that have our default value. Needed if the server may take other
    # defaults from the model's files.
    says_defaults: bool = True
    max_stops: int | None = None
    # fields that make the server report which stop string ended the text
    asks_for_stop: Mapping[str, bool] = field(default_factory=dict)
    strict_tools: bool = False  # the server enforces a tool's schema only if the tool is strict
    max_seed: int = 2**63 - 1
    min_top_logprobs: int = 0  # if fewer are requested, the server returns no logprobs at all
    chat_limit_name: str = "max_tokens"
    features: frozenset[Feature] = frozenset()
    option_fields: frozenset[str] = frozenset()  # template options that are separate fields
    chat_grammars: Grammars = field(default_factory=dict)
    completion_grammars: Grammars = field(default_factory=dict)
    tokens: TokenApi | None = None
    capabilities: tuple[str, ...] = ("completions", "chat", "tools", "json_schema")
    probes_embeddings: bool = False  # send a test request at start to see if it has embeddings
    sampler_names: Mapping[str, str] = field(default_factory=dict)  # in `samplers`
    # Whether the server must be told how many tokens penalties and DRY look at. By default it takes
    # few of them, and it does not know -1 for all.
    needs_windows: bool = False


_SAMPLER_FIELDS = frozenset(SAMPLER_FIELDS)
# Parameters that OpenAI's own API does not have. Most of them are vLLM's.
_ADDITIONS = frozenset(SamplingParams.__struct_fields__) - {
    *("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "n", "stop", "logprobs"),
}
_CHAT_FEATURES: frozenset[Feature] = frozenset(
    {
        "tool_choice",
        "parallel_tool_calls",
        "continue_final_message",
        "add_generation_prompt",
        "chat_template_kwargs",
        "reasoning_content",
    }
)
_VLLM_TOKENS = TokenApi(
    text="prompt", special="add_special_tokens", decoded="prompt", chats="messages"
)

ENGINE = Dialect(
    name="engine",
    signature=("/v1/capabilities", "engine"),
    health_path="/health",
    says_defaults=False,
    max_stops=16,
    features=_CHAT_FEATURES
    | {
        "token_ids",
        "suffix",
        "completion_logprobs",
        "add_special_tokens",
        "parse_special",
        "priority",
        "cache_salt",
        "truncate_prompt_tokens",
        "base64",
    },
    chat_grammars=_ALL_STRUCTURED,
    completion_grammars=_ALL_STRUCTURED,
    tokens=_VLLM_TOKENS,
)
VLLM = Dialect(
    name="vllm",
    signature=("/version", "version"),
    health_path="/health",
    lacks=_SAMPLER_FIELDS - {"allowed_token_ids", "bad_words"} | {"text_bias"},
    strict_tools=True,
    features=_CHAT_FEATURES
    | {
        "token_ids",
        "completion_logprobs",
        "add_special_tokens",
        "parse_special",
        "priority",
        "cache_salt",
        "truncate_prompt_tokens",
        "base64",
    },
    chat_grammars=_ALL_STRUCTURED,
    completion_grammars=_ALL_STRUCTURED,
    tokens=_VLLM_TOKENS,
    probes_embeddings=True,
)
_SGLANG_GRAMMARS: Grammars = {**_JSON, "regex": "regex", "choice": "regex", "grammar": "ebnf"}
SGLANG = Dialect(
    name="sglang",
    signature=("/get_model_info", "model_path"),
    health_path="/health",
    lacks=(_SAMPLER_FIELDS - {"stop_regex"}) | {"text_bias", "logprob_token_ids"},
    features=(_CHAT_FEATURES - {"add_generation_prompt"})
    | {"token_ids", "completion_logprobs", "parse_special", "priority", "cache_salt"},
    chat_grammars=_SGLANG_GRAMMARS,
    completion_grammars=_SGLANG_GRAMMARS,
    tokens=TokenApi(text="prompt", special="add_special_tokens", decoded="text"),
    probes_embeddings=True,
)
LLAMA_SERVER = Dialect(
    name="llama-server",
    signature=("/props", "default_generation_settings"),
    health_path="/health",
    lacks=frozenset(
        {
            "min_tokens",
            "stop_token_ids",
            "score_prompt",
            "allowed_token_ids",
            "bad_words",
            "stop_regex",
            "skip_special_tokens",
            "logprob_token_ids",
        }
    ),
    emulated=frozenset({"n"}),
    names={"repetition_penalty": "repeat_penalty"},
    asks_for_stop={"verbose": True},
    max_seed=2**31 - 1,
    min_top_logprobs=1,
    features=_CHAT_FEATURES | {"token_ids", "completion_logprobs", "parse_special", "base64"},
    chat_grammars={**_JSON, "grammar": "gbnf", "choice": "gbnf"},
    completion_grammars={
        "json_object": "json_schema",
        "json_schema": "json_schema",
        "grammar": "gbnf",
        "choice": "gbnf",
    },
    tokens=TokenApi(text="content", special="add_special", decoded="content", chats="template"),
    probes_embeddings=True,
    needs_windows=True,
    sampler_names={"typical_p": "typ_p"},
)
OLLAMA = Dialect(
    name="ollama",
    signature=("/api/version", "version"),
    health_path="/api/version",
    lacks=_ADDITIONS | {"logit_bias"},
    emulated=frozenset({"n", "top_k"}),
    features=frozenset({"suffix", "reasoning_content", "base64"}),
    option_fields=frozenset({"reasoning_effort"}),
    chat_grammars=_JSON,
    # Others are added if Ollama reports them for the model.
    capabilities=("completions", "chat", "json_schema"),
)
TGI = Dialect(
    name="tgi",
    signature=("/info", "max_total_tokens"),
    health_path="/health",
    lacks=_ADDITIONS | {"logit_bias", "presence_penalty"},
    emulated=frozenset({"n", "top_k"}),
    max_stops=4,
    features=frozenset({"tool_choice"}),
    chat_grammars={**_JSON, "regex": "format_regex", "choice": "format_regex"},
)
OPENAI = Dialect(
    name="openai",
    probe_interval_s=30.0,  # a remote service: don't poll its model list often
    lacks=_ADDITIONS,
    emulated=frozenset({"top_k"}),
    says_defaults=False,  # some models refuse even default values
    max_stops=4,
    chat_limit_name="max_completion_tokens",
    features=frozenset(
        {"tool_choice", "parallel_tool_calls", "token_ids", "completion_logprobs", "base64"}
    ),
    option_fields=frozenset({"reasoning_effort"}),
    chat_grammars=_JSON,
)

# The order matters for detection. llama-server and SGLang also answer Ollama's paths, and our
# server answers vLLM's.
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {each.name: each for each in (ENGINE, SGLANG, LLAMA_SERVER, TGI, OLLAMA, VLLM, OPENAI)}
)
