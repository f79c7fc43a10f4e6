"""One drawn request in every API and dialect that can say it.

A request is a raw prompt or a conversation. All APIs of one kind must give the same answer to it.
What an API can't say makes `spell` return None, unless it only concerns how the request is served.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image

from tests.oracle.http.keys import KEYS
from tests.oracle.requests import FEATURES, DrawnRequest
from tests.oracle.toy_model import SITES, WIDTH

WORDS = ("alpha ", "beta, ", "ab", "cd e", " é☺", "1. ", "\nabc", "xyz ", '"q" ', "a b c ")
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": "f",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 25]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
)
GRAMMARS = {"regex": "[abc]{2,7}(\\.|é)", "choice": "(yes|no|abcde)( a| b)?"}
SCHEMA = {
    "type": "object",
    "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "boolean"}},
    "required": ["k", "n"],
    "additionalProperties": False,
}
Body = dict[str, Any]
# Parameters that say the same with the names of another server.
LLAMACPP = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "n": "n_cmpl"}
SGLANG = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
OLLAMA = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
# Features that say how a request is served. An API without a name for one leaves it out.
SERVED = frozenset({"priority", "salt", "prediction", "progress", "tenant", "reader", "api"})


@dataclass(frozen=True)
class Call:
    """A request of HTTP."""

    path: str
    body: Body
    headers: Mapping[str, str]
    salt: str | None = None  # as the API could say it
    model: str = ""


@dataclass(frozen=True)
class Api:
    """An endpoint. `write` makes the body of a request, or returns None if it can't say it."""

    path: str
    is_chat: bool
    write: Callable[[DrawnRequest, Body], Body | None]
    stream_path: str = ""
    key_header: str = "authorization"
    # Names of features besides sampling that it can say
    says: frozenset[str] = frozenset()


def prompt_text(drawn: DrawnRequest) -> str:
    return "".join(WORDS[index % len(WORDS)] for index in drawn.prompt)


def spell(drawn: DrawnRequest, name: str, model: str = "toy") -> Call | None:
    """The request in the API of this name; ".stream" at its end asks for a stream."""
    api_name, _, stream = name.partition(".")
    api = APIS[api_name]
    if needs_chat(drawn) not in (None, api.is_chat):
        return None
    known = api.says | SERVED
    if any(each not in known for each in drawn.features if not _is_sampling(each)):
        return None
    body = api.write(drawn, _sampling(drawn))
    if body is None:
        return None
    key = KEYS[drawn["tenant"]]
    model = drawn["adapter"] or model
    path = (api.stream_path if stream and api.stream_path else api.path).format(model=model)
    if "{model}" not in api.path:
        body["model"] = model
    if api_name not in ("kserve", "kserve_json"):
        body["stream"] = bool(stream)
        if stream and api_name in ("chat", "completions", "azure", "foreign"):
            body["stream_options"] = {"include_usage": True}
    salt = None
    if "salt" in drawn and "salt" in api.says:
        salt = body["cache_salt"] = drawn["salt"]
    if "priority" in drawn and "priority" in api.says:
        body["priority"] = drawn["priority"]
    secret = key if api.key_header == "x-api-key" else f"Bearer {key}"
    return Call(path, body, {api.key_header: secret}, salt, model)


def needs_chat(drawn: DrawnRequest) -> bool | None:
    """Whether the request must be a conversation; None: it may be one."""
    if not drawn.features.keys().isdisjoint(("tools", "reasoning", "follows", "image")):
        return True
    return False if "echo" in drawn or "score_prompt" in drawn else None


def _is_sampling(name: str) -> bool:
    return FEATURES[name].is_sampling


def _sampling(drawn: DrawnRequest) -> Body:
    found = dict(drawn.sampling)
    found.setdefault("temperature", 0.0)
    if "min_tokens" in found and "max_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"]}
    return found


def _messages(drawn: DrawnRequest) -> list[Body]:
    text = prompt_text(drawn)
    if "image" not in drawn:
        return [{"role": "user", "content": text}]
    picture = {"type": "image_url", "image_url": {"url": _data_url(drawn)}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def _data_url(drawn: DrawnRequest) -> str:
    return f"data:image/png;base64,{picture(drawn['image'][0])}"


@cache
def picture(name: str) -> str:
    """An image file in base64, which is another one for each name."""
    file = BytesIO()
    Image.frombytes("RGB", (4, 4), hashlib.sha384(name.encode()).digest()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _interp(drawn: DrawnRequest) -> Body:
    """What a request reads and changes inside the model."""
    found: Body = {}
    if "captures" in drawn:
        found["capture"] = [{"site": site, "phase": phase} for site, phase in drawn["captures"]]
        if len(drawn["captures"]) > 1:
            found["lens"] = {"layers": [0, 1], "top": 3}
    if "steering" in drawn:
        name, phase = drawn["steering"]
        vector = [0.25 if name == "up" else -0.25] * WIDTH
        edit = {"site": SITES[0].name, "op": "add", "scale": 0.5, "vector": vector, "phase": phase}
        found["edit"] = [edit]
    return {"interp": found} if found else {}


def _renamed(sampling: Body, names: Mapping[str, str]) -> Body:
    return {names.get(name, name): value for name, value in sampling.items()}


def _tools(drawn: DrawnRequest) -> Body:
    if "tools" not in drawn:
        return {}
    tools = [{"type": "function", "function": each} for each in TOOLS]
    return {"tools": tools, "tool_choice": drawn["tools"]}


def _structured(drawn: DrawnRequest) -> Body:
    kind = drawn["grammar"]
    if kind is None:
        return {}
    return {"structured_outputs": {"json": SCHEMA} if kind == "json" else {"regex": GRAMMARS[kind]}}


def _openai(drawn: DrawnRequest, sampling: Body) -> Body:
    body = sampling | _structured(drawn) | {"return_token_ids": True} | _interp(drawn)
    if "prediction" in drawn:
        body["prediction"] = {"type": "content", "content": "ab abc cd. a 1"}
    if "progress" in drawn:
        body["timings_per_token"] = True
    return body


def _completions(drawn: DrawnRequest, sampling: Body) -> Body | None:
    scores = sampling.pop("score_prompt", False)
    if (scores and "logprobs" not in sampling) or _may_not_read(drawn):
        return None
    body = _openai(drawn, sampling) | {"prompt": prompt_text(drawn)}
    return body | {"echo": True} if scores or "echo" in drawn else body


def _may_not_read(drawn: DrawnRequest) -> bool:
    """Whether it reads activations, and may end at a text."""
    return "captures" in drawn and ("stop" in drawn or "stop_regex" in drawn)


def _chat(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if "score_prompt" in sampling or _may_not_read(drawn):
        return None
    top = sampling.pop("logprobs", None)
    body = _openai(drawn, sampling) | {"messages": _messages(drawn)} | _tools(drawn)
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    if "reasoning" in drawn:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


def _foreign(drawn: DrawnRequest, sampling: Body) -> Body | None:
    """A chat with the names that other servers have for OpenAI's parameters."""
    body = _chat(drawn, sampling)
    if body is None:
        return None
    body = _renamed(body, LLAMACPP | {"min_tokens": "min_new_tokens", "seed": "random_seed"})
    if "structured_outputs" in body:
        constraint = body.pop("structured_outputs")
        name = "guided_json" if "json" in constraint else "guided_regex"
        body[name] = next(iter(constraint.values()))
    if body.pop("chat_template_kwargs", None):
        body["think"] = True
    return body


def _responses(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if sampling.pop("n", 1) != 1 or "score_prompt" in sampling:
        return None
    body = _renamed(sampling, {"max_tokens": "max_output_tokens"})
    top = body.pop("logprobs", None)
    body["input"] = text = prompt_text(drawn)
    if "image" in drawn:
        parts = [
            {"type": "input_image", "image_url": _data_url(drawn)},
            {"type": "input_text", "text": text},
        ]
        body["input"] = [{"role": "user", "content": parts}]
    if top is not None:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": top}
    if "tools" in drawn:
        body["tools"] = [{"type": "function", "strict": False, **each} for each in TOOLS]
        body["tool_choice"] = drawn["tools"]
    if drawn["grammar"] == "json":
        body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    elif "grammar" in drawn:
        return None
    return body


def _anthropic(drawn: DrawnRequest, sampling: Body) -> Body | None:
    """Anthropic's API has no seed, so it can only ask for the likeliest tokens."""
    sampling.pop("seed", None)
    if sampling["temperature"] or not sampling.keys() <= {"temperature", "max_tokens", "stop"}:
        return None
    body = _renamed(sampling, {"stop": "stop_sequences"}) | {"messages": _messages(drawn)}
    if "image" in drawn:
        source = {"type": "base64", "media_type": "image/png", "data": picture(drawn["image"][0])}
        body["messages"][0]["content"][0] = {"type": "image", "source": source}
    if "tools" in drawn:
        body["tools"] = [
            {
                "name": each["name"],
                "description": each["description"],
                "input_schema": each["parameters"],
            }
            for each in TOOLS
        ]
        body["tool_choice"] = {"type": "any" if drawn["tools"] == "required" else "auto"}
    if "reasoning" in drawn:
        body["thinking"] = {"type": "adaptive"}
    if drawn["grammar"] == "json":
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    elif "grammar" in drawn:
        return None
    return body


def _ollama_options(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if sampling.pop("n", 1) != 1 or "score_prompt" in sampling:
        return None
    top = sampling.pop("logprobs", None)
    options = _renamed(sampling, OLLAMA)
    if {"repeat_penalty", "presence_penalty", "frequency_penalty"} & options.keys():
        options.setdefault("repeat_last_n", -1)
    body: Body = {"options": options}
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    if drawn["grammar"] == "json":
        body["format"] = SCHEMA
    elif "grammar" in drawn:
        return None
    return body


def _ollama_chat(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if drawn["tools"] not in (None, "auto"):
        return None
    body = _ollama_options(drawn, sampling)
    if body is None:
        return None
    message = {"role": "user", "content": prompt_text(drawn), **_ollama_images(drawn)}
    body |= {"messages": [message]} | _tools(drawn)
    body.pop("tool_choice", None)
    return body | {"think": True} if "reasoning" in drawn else body


def _ollama_generate(drawn: DrawnRequest, sampling: Body) -> Body | None:
    body = _ollama_options(drawn, sampling)
    if body is None:
        return None
    body |= {"prompt": prompt_text(drawn), **_ollama_images(drawn)}
    return body | {"think": True} if "reasoning" in drawn else body


def _ollama_images(drawn: DrawnRequest) -> Body:
    return {"images": [picture(drawn["image"][0])]} if "image" in drawn else {}


def _ollama_raw(drawn: DrawnRequest, sampling: Body) -> Body | None:
    body = _ollama_options(drawn, sampling)
    return None if body is None else body | {"prompt": prompt_text(drawn), "raw": True}


def _llamacpp(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if sampling.get("logprobs") == 0 or "score_prompt" in sampling:
        return None
    body = _renamed(sampling, LLAMACPP | {"logprobs": "n_probs"})
    if drawn["grammar"] == "json":
        body["json_schema"] = SCHEMA
    elif "grammar" in drawn:
        return None
    if "progress" in drawn:
        body["timings_per_token"] = True
    return body | {"prompt": prompt_text(drawn), "return_tokens": True}


def _sglang(drawn: DrawnRequest, sampling: Body) -> Body | None:
    top, scores = sampling.pop("logprobs", None), sampling.pop("score_prompt", False)
    if scores and top is None:
        return None
    params = _renamed(sampling, SGLANG)
    body: Body = {"text": prompt_text(drawn), "sampling_params": params}
    if top is not None:
        body |= {"return_logprob": True, "top_logprobs_num": top, "return_text_in_logprobs": True}
    if scores:
        body["logprob_start_len"] = 0
    if drawn["grammar"] == "json":
        params["json_schema"] = json.dumps(SCHEMA)
    elif "grammar" in drawn:
        params["regex"] = GRAMMARS[drawn["grammar"]]
    return body


def _kserve(drawn: DrawnRequest, sampling: Body) -> Body | None:
    if sampling.pop("n", 1) != 1 or {"logprobs", "score_prompt"} & sampling.keys():
        return None
    wanted = dict.fromkeys(
        ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True
    )
    return sampling | _structured(drawn) | {"text_input": prompt_text(drawn)} | wanted


def _kserve_json(drawn: DrawnRequest, sampling: Body) -> Body | None:
    """As Triton's vLLM backend is asked: with the parameters as the text of an object."""
    body = _kserve(drawn, sampling)
    if body is None or "structured_outputs" in body:
        return None
    returned = {name: body.pop(name) for name in list(body) if name.startswith("return_")}
    text = body.pop("text_input")
    return returned | {"text_input": text, "sampling_parameters": json.dumps(body)}


_SERVING = frozenset({"salt", "priority", "adapter"})
_ALL_CHAT = _SERVING | {"tools", "reasoning", "grammar", "follows", "image"}
_TAPS = frozenset({"captures", "steering"})
_TEXT = _SERVING | _TAPS | {"grammar"}
_CHAT = _ALL_CHAT | _TAPS
_KSERVE = "/v2/models/{model}/generate"
APIS = {
    "completions": Api(
        "/v1/completions", False, _completions, says=_SERVING | _TAPS | {"grammar", "echo"}
    ),
    "llamacpp": Api("/completion", False, _llamacpp, says=_SERVING | {"grammar"}),
    "sglang": Api("/generate", False, _sglang, says=_SERVING | {"grammar"}),
    "kserve": Api(_KSERVE, False, _kserve, _KSERVE + "_stream", says=_SERVING | {"grammar"}),
    "kserve_json": Api(_KSERVE, False, _kserve_json, _KSERVE + "_stream", says=_SERVING),
    "ollama_raw": Api("/api/generate", False, _ollama_raw, says=_SERVING | {"grammar"}),
    "chat": Api("/v1/chat/completions", True, _chat, says=_CHAT),
    "foreign": Api("/v1/chat/completions", True, _foreign, says=_CHAT),
    "azure": Api(
        "/openai/deployments/{model}/chat/completions", True, _chat, says=_ALL_CHAT | _TAPS
    ),
    "responses": Api(
        "/v1/responses", True, _responses, says=_SERVING | {"tools", "grammar", "follows", "image"}
    ),
    "anthropic": Api(
        "/v1/messages",
        True,
        _anthropic,
        key_header="x-api-key",
        says=frozenset({"tools", "reasoning", "grammar", "adapter", "follows", "image"}),
    ),
    "ollama_chat": Api("/api/chat", True, _ollama_chat, says=_ALL_CHAT),
    "ollama_generate": Api(
        "/api/generate", True, _ollama_generate, says=_ALL_CHAT - {"tools", "follows"}
    ),
}
NAMES = tuple(name + end for name in APIS for end in ("", ".stream"))
