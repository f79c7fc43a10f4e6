"""Builds request bodies in a server's dialect. No parameter is dropped silently: each is sent,
emulated, or refused with an error that names it.
"""

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from engine.backends.openai.dialects import Dialect, Feature, GrammarForm, Grammars
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    GenerationContext,
    GrammarSpec,
)
from engine.core.interfaces.request import LIST_FIELDS, NUMBER_FIELDS, SamplingParams
from engine.frontend.prompts import check_params, check_prompt

# Characters with a special meaning in the regular expressions of some server.
_SPECIAL = frozenset("\\.^$*+?{}[]|()-/")


def grammar_fields(spec: GrammarSpec, grammars: Grammars, server: str) -> dict[str, Any]:
    """Request fields for a grammar. Raises if the dialect can't enforce it."""
    form = grammars.get(spec.kind)
    if form is None:
        can = f"it can follow {', '.join(sorted(grammars))}" if grammars else "it can follow none"
        raise InvalidRequestError(
            f"{spec.param} can't be used here: the model's server ({server}) holds no answer of "
            f"this kind to a {spec.kind}; {can}.",
            param=spec.param,
            code="unsupported_parameter",
        )
    return _fields(spec, form)


def _fields(spec: GrammarSpec, form: GrammarForm) -> dict[str, Any]:
    if form == "response_format":
        return {"response_format": _response_format(spec)}
    if form == "structured_outputs":
        return {"structured_outputs": {spec.kind: _value(spec)}}
    if form == "json_schema":
        return {"json_schema": {"type": "object"} if spec.kind == "json_object" else _value(spec)}
    if form == "ebnf":
        return {"ebnf": spec.source}
    if form == "gbnf":
        return {"grammar": _gbnf_choice(spec) if spec.kind == "choice" else spec.source}
    regex = _regex_choice(spec) if spec.kind == "choice" else spec.source
    if form == "regex":
        return {"regex": regex}
    return {"response_format": {"type": "regex", "value": regex}}


def _value(spec: GrammarSpec) -> Any:
    return (
        msgspec.json.decode(spec.source) if spec.kind in ("json_schema", "choice") else spec.source
    )


def _response_format(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind == "json_object":
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": _value(spec), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _regex_choice(spec: GrammarSpec) -> str:
    choices = ["".join(f"\\{c}" if c in _SPECIAL else c for c in text) for text in _value(spec)]
    return f"({'|'.join(choices)})"


def _gbnf_choice(spec: GrammarSpec) -> str:
    """A GBNF grammar of the choices. llama.cpp's literals use JSON's string escapes."""
    literals = [msgspec.json.encode(text).decode() for text in _value(spec)]
    return f"root ::= {' | '.join(literals)}"


_DEFAULTS = SamplingParams()
_MIN_BIAS = -100.0
_WINDOWS = ("repeat_last_n", "dry_penalty_last_n")


class BodyBuilder:
    """Builds bodies for one model of one server."""

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._dialect = dialect
        self._model = model
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size  # None: the server checks ids itself
        self._extra = dict(extra)

    def chat(self, request: ChatRequest) -> dict[str, Any]:
        dialect, params = self._dialect, request.context.params
        body = self._common(request.context)
        body["messages"] = [
            self._message(position, each) for position, each in enumerate(request.messages)
        ]
        if params.score_prompt:
            raise self._refusal("prompt_logprobs", "gives none of chats")
        if params.max_tokens is not None:
            body[dialect.chat_limit_name] = params.max_tokens
        if params.logprobs is not None:
            body["logprobs"] = True
            body["top_logprobs"] = max(params.logprobs, dialect.min_top_logprobs)
        if request.context.grammar is not None:
            body |= grammar_fields(request.context.grammar, dialect.chat_grammars, dialect.name)
        body |= self._tools(request)
        return body | self._end_of_prompt(request) | self._options(request)

    def completion(self, request: CompletionRequest) -> dict[str, Any]:
        """The body of a completion. `echo` is only sent if the logprobs of the prompt's tokens are
        needed. Otherwise we add the prompt's text ourselves.
        """
        dialect, params = self._dialect, request.context.params
        body = self._common(request.context)
        if not isinstance(request.prompt, str):
            self._need("token_ids", "prompt", "takes no token ids; send text")
            if self._vocab_size is not None:
                check_prompt(request.prompt, self._vocab_size, "prompt")
        body["prompt"] = request.prompt
        body["max_tokens"] = params.max_tokens
        if params.logprobs is not None:
            self._need("completion_logprobs", "logprobs", "gives none of completions")
            body["logprobs"] = max(params.logprobs, dialect.min_top_logprobs)
        if not request.add_special_tokens:
            self._need("add_special_tokens", "add_special_tokens", "always adds them")
            body["add_special_tokens"] = False
        if request.parse_special:
            # Servers other than ours parse control tokens in any case, and ignore the field.
            self._need("parse_special", "parse_special", "reads control tokens as text")
            body["parse_special"] = True
        if request.suffix is not None:
            self._need("suffix", "suffix", "takes none")
            body["suffix"] = request.suffix
        if request.context.grammar is not None:
            spec = request.context.grammar
            body |= grammar_fields(spec, dialect.completion_grammars, dialect.name)
        if params.score_prompt:
            if params.prompt_logprobs is not None:
                body["logprobs"] = max(params.prompt_logprobs, body.get("logprobs", 0))
            body |= {"echo": True, "stream": False}
            del body["stream_options"]
        return body

    def embedding(self, request: EmbedRequest) -> dict[str, Any]:
        inputs = request.inputs
        if not all(isinstance(each, str) for each in inputs):
            self._need("token_ids", "input", "takes no token ids; send text")
        body: dict[str, Any] = {"model": self._model, "input": list(inputs)}
        if "base64" in self._dialect.features:
            body["encoding_format"] = "base64"
        return body | self._hints(request.priority, request.salt, request.truncate_prompt_tokens)

    def tokenized_chat(self, request: ChatRequest) -> dict[str, Any]:
        """The fields that determine how a conversation is rendered."""
        body: dict[str, Any] = {"model": self._model}
        body["messages"] = [
            self._message(position, each) for position, each in enumerate(request.messages)
        ]
        if request.tools:
            body["tools"] = self._offered(request)
        return body | self._end_of_prompt(request) | self._options(request)

    def _common(self, context: GenerationContext) -> dict[str, Any]:
        dialect, params = self._dialect, _greedy_if_one(context.params, self._dialect)
        if self._vocab_size is not None:
            check_params(params, self._vocab_size)
        body = self._extra | {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in NUMBER_FIELDS:  # they are sent unchanged, under the dialect's names
            value = getattr(params, name)
            is_said = dialect.says_defaults and name not in dialect.lacks | dialect.emulated
            if is_said or value != getattr(_DEFAULTS, name):
                body[dialect.names.get(name, name)] = value
        for name in LIST_FIELDS:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                body[name] = list(getattr(params, name))
        if params.samplers:
            body["samplers"] = [dialect.sampler_names.get(each, each) for each in params.samplers]
        for name in _WINDOWS if dialect.needs_windows else ():
            if getattr(params, name) < 0:
                body[name] = self._max_model_len
        if params.n > 1:
            body["n"] = params.n
        if params.seed is not None:
            body["seed"] = params.seed % (dialect.max_seed + 1)
        if params.logit_bias or params.text_bias:
            body["logit_bias"] = _biases(params, dialect)
        if params.stop:
            body["stop"] = list(params.stop[: dialect.max_stops])
            body |= dialect.asks_for_stop
        if params.stop_token_ids:
            body["stop_token_ids"] = list(params.stop_token_ids)
        if params.logprob_token_ids:
            body["logprob_token_ids"] = list(params.logprob_token_ids)
        for name in dialect.lacks:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise self._refusal(name, "has no such parameter")
        truncation = context.truncate_prompt_tokens
        if truncation is not None and context.truncation_side == "right":
            body["truncation_side"] = "right"
        return body | self._hints(context.priority, context.salt, truncation)

    def _hints(self, priority: int, salt: str, truncation: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {}
        if priority and "priority" in self._dialect.features:
            body["priority"] = priority
        if truncation is not None:
            self._need("truncate_prompt_tokens", "truncate_prompt_tokens", "cuts no prompts")
            body["truncate_prompt_tokens"] = truncation
        if salt and "cache_salt" in self._dialect.features:
            body["cache_salt"] = hashlib.sha256(salt.encode()).hexdigest()
        return body

    def _message(self, position: int, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] != "assistant":
            return message
        made = {key: value for key, value in message.items() if key != "reasoning_content"}
        if reasoning := message.get("reasoning_content"):
            place = f"messages[{position}].reasoning_content"
            self._need("reasoning_content", place, "takes no reasoning of earlier answers")
            made |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_call(each) for each in calls]
            made["content"] = message["content"] or None
        return made

    def _tools(self, request: ChatRequest) -> dict[str, Any]:
        if not request.tools:
            return {}
        features, choice = self._dialect.features, request.tool_choice
        body: dict[str, Any] = {"tools": self._offered(request)}
        if choice.mode == "named":
            self._need("tool_choice", "tool_choice", "always chooses by itself")
            function = {"name": choice.name}
            body["tool_choice"] = {"type": "function", "function": function}
        elif choice.mode == "none" and "tool_choice" not in features:
            return {}  # the model can't call tools that it does not see
        elif choice.mode != "auto" or "tool_choice" in features:
            self._need("tool_choice", "tool_choice", "always chooses by itself")
            body["tool_choice"] = choice.mode
        if "parallel_tool_calls" in features:
            body["parallel_tool_calls"] = request.parallel_tool_calls
        elif not request.parallel_tool_calls:
            raise self._refusal("parallel_tool_calls", "has no such parameter")
        return body

    def _offered(self, request: ChatRequest) -> list[dict[str, Any]]:
        """The tools. They are made strict if the server only enforces the schemas of strict
        tools.
        """
        if not self._dialect.strict_tools or request.tool_choice.mode == "none":
            return list(request.tools)
        return [_strict(tool) for tool in request.tools]

    def _end_of_prompt(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {}
        if request.continue_final_message:
            what = "begins every answer anew"
            self._need("continue_final_message", "continue_final_message", what)
            body = {"continue_final_message": True}
            if "add_generation_prompt" in self._dialect.features:
                body["add_generation_prompt"] = False
        elif not request.add_generation_prompt:
            what = "always opens an answer"
            self._need("add_generation_prompt", "add_generation_prompt", what)
            body["add_generation_prompt"] = False
        return body

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        fields = self._dialect.option_fields
        body = {key: value for key, value in request.template_options.items() if key in fields}
        rest = {key: value for key, value in request.template_options.items() if key not in fields}
        if rest:
            self._need("chat_template_kwargs", "chat_template_kwargs", "has no such parameter")
            body["chat_template_kwargs"] = rest
        return body

    def _need(self, feature: Feature, param: str, what: str) -> None:
        if feature not in self._dialect.features:
            raise self._refusal(param, what)

    def _refusal(self, param: str, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{param} can't be used here: the model's server ({self._dialect.name}) {what}.",
            param=param,
            code="unsupported_parameter",
        )


def _greedy_if_one(params: SamplingParams, dialect: Dialect) -> SamplingParams:
    """Emulate `top_k` for servers that don't have it. A `top_k` of 1 is the same as temperature 0.
    At temperature 0, `top_k` has no effect. Other uses are refused.
    """
    if "top_k" not in dialect.emulated or not params.top_k:
        return params
    if params.top_k != 1 and params.temperature > 0:
        raise InvalidRequestError(
            f"top_k can't be used here, except as 1: the model's server ({dialect.name}) has no "
            "such parameter.",
            param="top_k",
            code="unsupported_parameter",
        )
    return msgspec.structs.replace(params, top_k=0, temperature=0.0)


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Make a tool strict. If only `{}` matches its schema, the schema becomes this constant.
    Otherwise vLLM would allow any amount of whitespace inside the braces, and a small model might
    never stop writing it.
    """
    function = tool["function"] | {"strict": True}
    schema = function.get("parameters") or {}
    takes_nothing = schema.get("type") == "object" and schema.get("additionalProperties") is False
    if takes_nothing and not (schema.get("properties") or schema.get("patternProperties")):
        function["parameters"] = schema | {"const": {}}
    return tool | {"function": function}


def _biases(params: SamplingParams, dialect: Dialect) -> Any:
    """The field `logit_bias`. If a bias is about a text or excludes a token, it is a list of pairs,
    for servers that know texts. Others exclude a token by the lowest bias of OpenAI's API.
    """
    biases = [*params.logit_bias.items(), *params.text_bias.items()]
    is_plain = not params.text_bias and all(map(math.isfinite, params.logit_bias.values()))
    if is_plain or "text_bias" in dialect.lacks:
        return {str(key): max(bias, _MIN_BIAS) for key, bias in biases}
    return [[key, bias if math.isfinite(bias) else False] for key, bias in biases]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text."""
    function = call["function"]
    arguments = msgspec.json.encode(function["arguments"]).decode()
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
