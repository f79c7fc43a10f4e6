"""Sampling parameters of the Python API. The names and defaults are those of vLLM.

An `LLM` converts them with `wire_params` to the parameters that an engine takes.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import msgspec

from engine.core.errors import InvalidRequestError
from engine.core.interfaces import request
from engine.core.interfaces.backend import GrammarSpec

if TYPE_CHECKING:
    from engine.backends.beam_search import BeamRules


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream contains."""

    CUMULATIVE = 0  # everything since the start of the answer
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # the whole answer, in a single output at the end


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """A constraint on the output. Exactly one of the fields must be set. `json` is a JSON schema,
    as an object or as JSON text. `grammar` is in Lark or GBNF.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def spec(self) -> GrammarSpec | None:
        from engine.servers.schema.structured import parse_structured_outputs

        given = msgspec.structs.asdict(self)
        if given["choice"] is not None:
            given["choice"] = list(given["choice"])
        if given["json"] is not None and not isinstance(given["json"], str):
            given["json"] = dict(given["json"])
        if all(value in (None, False) for value in given.values()):
            raise InvalidRequestError(
                f"structured_outputs needs one of {', '.join(given)}", param="structured_outputs"
            )
        return parse_structured_outputs(given)


class SamplingParams(request.SamplingParams, frozen=False, kw_only=True):  # type: ignore[misc]
    """How tokens are sampled, and what an output contains. Fields may be changed after
    construction; a request uses the values at the time of the call.
    """

    top_k: int = 0  # 0 or -1: top-k is off
    stop: str | Sequence[str] | None = None  # type: ignore[assignment]
    stop_token_ids: Sequence[int] | None = None  # type: ignore[assignment]
    logit_bias: Mapping[int, float] | None = None  # type: ignore[assignment]
    logprob_token_ids: Sequence[int] | None = None  # type: ignore[assignment]
    allowed_token_ids: Sequence[int] | None = None  # type: ignore[assignment]
    bad_words: Sequence[str] | None = None  # type: ignore[assignment]
    stop_regex: str | Sequence[str] | None = None  # type: ignore[assignment]
    dry_sequence_breakers: Sequence[str] = request.DRY_BREAKERS  # type: ignore[assignment]
    samplers: Sequence[str] = ()  # type: ignore[assignment]
    structured_outputs: StructuredOutputsParams | None = None
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # The fields below accept only their defaults. Other values are refused by name.
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def clone(self) -> "SamplingParams":
        """A copy, so that changes to one object do not affect the other."""
        return msgspec.structs.replace(self)


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """The parameters of `LLM.beam_search`. The score of a beam is divided by its length, the
    prompt's included, to the power of `length_penalty`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    # End the search when `beam_width` beams have ended.
    early_stopping: bool = False

    def rules(self) -> "BeamRules":
        from engine.backends.beam_search import BeamRules

        if self.beam_width < 1 or self.max_tokens < 1:
            raise InvalidRequestError("beam_width and max_tokens must be at least 1")
        return BeamRules(
            self.beam_width,
            self.max_tokens,
            self.beam_width,
            self.length_penalty,
            self.ignore_eos,
            self.early_stopping,
        )


_ONLY_DEFAULTS = (
    "spaces_between_special_tokens",
    "detokenize",
)
_WIRE_FIELDS = request.SamplingParams.__struct_fields__
_BOUNDS: dict[str, request.Bound] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(request.SamplingParams, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def wire_params(params: request.SamplingParams) -> request.SamplingParams:
    """The parameters that the engine takes. Raises `InvalidRequestError` for values that are
    invalid or not supported.
    """
    given = {name: getattr(params, name) for name in _WIRE_FIELDS}
    for name in ("stop", "stop_regex"):
        # A text is one stop string. Without this line it would be taken as a sequence of letters.
        value = given[name]
        given[name] = (value,) if isinstance(value, str) else tuple(value or ())
    if isinstance(given["bad_words"], str):
        raise InvalidRequestError("bad_words should be a list of texts", param="bad_words")
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words"):
        given[name] = tuple(given[name] or ())
    given["logit_bias"] = dict(given["logit_bias"] or {})
    given["top_k"] = 0 if given["top_k"] == -1 else given["top_k"]
    if isinstance(params, SamplingParams):
        _check_defaults(params)
        if params.prompt_logprobs is not None:  # without it, the prompt has no log-probabilities
            given["score_prompt"] = True
    elif given["score_prompt"]:
        raise InvalidRequestError(
            "score_prompt is a field of the engine; set prompt_logprobs of engine.SamplingParams",
            param="score_prompt",
        )
    try:
        wire = msgspec.convert(given, request.SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"sampling parameters: {error}") from None
    check_params(wire)
    return wire.named_samplers_only()


def make_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Build `SamplingParams` from keyword arguments. If a name is unknown, the error lists the
    valid names. Without `max_tokens`, an answer may fill the context.
    """
    known = set(SamplingParams.__struct_fields__)
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InvalidRequestError(
            f"unknown sampling parameter {unknown[0]!r}; there are: {', '.join(sorted(known))}",
            param=unknown[0],
        )
    return SamplingParams(**{"max_tokens": None, **fields})


def _check_defaults(params: SamplingParams) -> None:
    if params.score_prompt:
        raise InvalidRequestError(
            "score_prompt is a field of the engine; set prompt_logprobs", param="score_prompt"
        )
    usual = SamplingParams()
    for name in _ONLY_DEFAULTS:
        value = getattr(params, name)
        if value != getattr(usual, name) and value not in ([], ()):
            raise InvalidRequestError(
                f"{name}={value!r} is not supported; leave {name} out", param=name
            )


def check_params(params: request.SamplingParams) -> None:
    """Raise an error if a sampling parameter is invalid."""
    order = params.samplers
    is_late = [name not in ("penalties", "dry") for name in order]
    rules = {
        bound.rule(name): bound.allows(getattr(params, name)) for name, bound in _BOUNDS.items()
    } | {
        "-inf <= logit_bias < inf": all(b < request.INFINITY for b in params.logit_bias.values()),
        "0 <= seed < 2**63": params.seed is None or 0 <= params.seed < 2**63,
        "no stop string is empty": all(params.stop),
        "no text of bad_words is empty": all(params.bad_words),
        "no stop_regex is empty": all(params.stop_regex),
        "no text of dry_sequence_breakers is empty": all(params.dry_sequence_breakers),
        f"samplers are different names of {', '.join(request.SAMPLERS)}": (
            set(order) <= set(request.SAMPLERS) and len(set(order)) == len(order)
        ),
        "in samplers, penalties and dry come before all others": is_late == sorted(is_late),
    }
    for rule, holds in rules.items():
        if not holds:
            raise InvalidRequestError(f"sampling parameters break the rule {rule}")
