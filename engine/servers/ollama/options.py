"""Ollama's `options` and `keep_alive`, converted to parameters and settings of this server.

Options that set up an engine can't be changed by a request. They cause a warning.
"""

import math
import re
from collections.abc import Container, Mapping
from typing import Any

from starlette.requests import Request

from engine.core.interfaces.backend import ModelCard
from engine.servers.http.errors import describe, problem
from engine.servers.serving.services import Services

# Ollama's names of our parameters. All other options with an effect have our names.
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# What Ollama uses if neither the request nor the model's preset sets these.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# Options without an effect, with the values that ask for nothing, and the reason.
_SET_UP = "is set when the server starts"
NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_num_predict": ((), "no draft model is used"),
    "embedding_only": ((False,), _SET_UP),
    "f16_kv": ((True,), "is set by cache.kv_dtype"),
    "logits_all": ((False,), _SET_UP),
    "low_vram": ((False,), _SET_UP),
    "main_gpu": ((0,), "is set by model.device"),
    "num_batch": ((512,), "is set by performance.max_batch_tokens"),
    "num_gpu": ((-1,), "is set by model.device"),
    "num_keep": ((), "an answer ends at the end of the context, which is never shifted"),
    "num_thread": ((0,), "is set by performance.threads"),
    "numa": ((False,), "is set by performance.affinity"),
    "penalize_newline": ((True,), "line breaks are penalized like all tokens"),
    "use_mlock": ((False,), _SET_UP),
    "use_mmap": ((True,), "is set by performance.use_mmap"),
    "vocab_only": ((False,), _SET_UP),
}
_REFUSED = {"tfs_z": (1, 1.0)}  # with the values that ask for nothing
MAX_SECONDS = 10**9
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")


def sampling_of(options: Any, known: Container[str], where: str = "options") -> dict[str, Any]:
    """Convert the options to parameters of this server. `known` has the names of parameters that
    the endpoint supports. Options without an effect are left out.
    """
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise problem(where, f"should be an object, got {describe(options)}")
    found: dict[str, Any] = {}
    name: str
    for name, value in options.items():
        if value is None or name == "num_ctx" or name in NO_EFFECT:
            continue
        if name in _REFUSED:
            if value not in _REFUSED[name]:
                raise problem(f"{where}.{name}", "is not supported; leave it out")
            continue
        to = _RENAMED.get(name, name)
        if to not in known:
            raise problem(f"{where}.{name[:64]}", "is not an option of this server")
        # From these values on downwards, there is no limit, or the seed is random.
        off = {"num_predict": 0, "seed": -1}.get(name)
        if off is None or type(value) is not int or value > off:
            found[to] = value
    return found


def check_options(
    services: Services, request: Request, card: ModelCard, options: Mapping[str, Any]
) -> None:
    """Warn the client about options that have no effect on this model."""
    for name, value in options.items():
        if value is None:
            continue
        if name == "num_ctx":
            _check_context(services, request, card, value)
        elif name in NO_EFFECT:
            off, reason = NO_EFFECT[name]
            if not any(type(value) is type(each) and value == each for each in off):
                services.warn(request, f"options.{name}", f"has no effect: {reason}")


def _check_context(services: Services, request: Request, card: ModelCard, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= 2**31:
        raise problem("options.num_ctx", f"should be a positive integer, got {describe(value)}")
    if value != card.max_model_len:
        what = f"{value} has no effect: the context of this model is {card.max_model_len} tokens"
        services.warn(request, "options.num_ctx", what)


def parse_keep_alive(value: Any) -> float | None:
    """Seconds that a model stays loaded after a request. Negative values mean forever."""
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, str):
        seconds = _seconds(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    if seconds is None or seconds > MAX_SECONDS:
        rule = 'should be seconds, or a duration such as "5m"'
        raise problem("keep_alive", f"{rule}, got {describe(value)}")
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if re.fullmatch(r"\d{1,12}", digits):
        return sign * float(digits)
    parts = _DURATION.findall(digits)
    if not parts or "".join(map("".join, parts)) != digits:
        return None
    return sign * sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
