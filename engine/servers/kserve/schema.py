"""Bodies of the Open Inference Protocol. The tensors of an inference request are parameters of
`TextBody`, which is also the body of `generate`.

The names of the tensors are those of Triton's vLLM backend: `text_input` is the prompt, and each
other tensor has one value, that of the parameter of its name. `sampling_parameters` is a JSON
object of parameters.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import describe, problem
from engine.servers.http.limits import decode_object, decode_text
from engine.servers.kserve import tensors
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody

DEFAULT_TOKENS = 16  # vLLM's default of max_tokens
PROMPT = "text_input"
Id = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Size = Annotated[int, Field(ge=0, le=tensors.MAX_ELEMENTS)]
# fmt: off
Datatype = Literal[
    "BYTES", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64",
    "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
]
# fmt: on
# Parameters of a request for the protocol itself, not for the model.
PROTOCOL_PARAMETERS = frozenset({"binary_data_output", "triton_enable_empty_final_response"})
# Parameters whose tensors may have several elements.
LISTS = frozenset({"stop", "bad_words", "stop_token_ids"})
# Names of TensorRT-LLM's tensors.
OTHER_NAMES = {"stop_words": "stop", "return_num_tokens": "return_num_output_tokens"}
# Clients of Triton's vLLM backend send numbers in `sampling_parameters` as text.
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false")
_TEXTS = frozenset({"stop", "bad_words", "user", "cache_salt", "truncation_side"})


class TensorBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    name: Name
    shape: Annotated[list[Size], Field(min_length=1, max_length=8)]
    datatype: Datatype
    parameters: dict[str, Any] = {}
    data: Any = None


class OutputBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    name: Name
    parameters: dict[str, Any] = {}

    @property
    def is_binary(self) -> bool | None:
        """Whether the client wants the tensor as bytes. None if it did not say so."""
        value = self.parameters.get("binary_data")
        return value if isinstance(value, bool) else None


class InferBody(BaseModel):
    """The JSON of an inference request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    id: Id = ""
    model_name: Name | None = None  # that of the path, which KServe's client repeats here
    inputs: Annotated[list[TensorBody], Field(min_length=1, max_length=64)]
    outputs: Annotated[list[OutputBody], Field(max_length=64)] = []
    parameters: dict[str, Any] = {}

    @property
    def is_binary(self) -> bool:
        return self.parameters.get("binary_data_output") is True

    @property
    def prompt_shape(self) -> list[int]:
        """The shape of `text_input`, which the outputs have too."""
        return next(each.shape for each in self.inputs if each.name == PROMPT)

    def words(self) -> dict[str, Any]:
        """All parameters of the request by name."""
        found = {
            name: value
            for name, value in self.parameters.items()
            if name not in PROTOCOL_PARAMETERS
        }
        for position, tensor in enumerate(self.inputs):
            where = f"inputs[{position}]"
            if tensor.name in found:
                raise problem(f"{where}.name", f"{describe(tensor.name)} is given twice")
            count = tensors.count_of(tensor.shape, where)
            values = tensors.from_json(tensor.datatype, tensor.data, count, where)
            found[tensor.name] = _value(tensor.name, values, where)
        if PROMPT not in found:
            raise problem("inputs", f"should have the tensor {PROMPT}")
        return spread(found)


def _value(name: str, values: list[Any], where: str) -> Any:
    if name == PROMPT or OTHER_NAMES.get(name, name) in LISTS:
        return values
    if any(each != values[0] for each in values):
        raise problem(where, f"{name} should have one value for the whole request")
    return values[0]


def spread(words: dict[str, Any]) -> dict[str, Any]:
    """Make the parameters in `parameters` and `sampling_parameters` parameters of the request."""
    flat: dict[str, Any] = {}
    for name, value in words.items():
        if name == "sampling_parameters" and isinstance(value, str):
            inner = _sampling(value)
        elif name == "parameters" and isinstance(value, dict):
            inner = spread(value) if PROMPT not in value else {}
        else:
            inner = {OTHER_NAMES.get(name, name): value}
        for key, each in inner.items():
            if flat.get(key, each) != each:
                raise problem(key, "is given twice")
            flat[key] = each
    return flat


def _sampling(text: str) -> dict[str, Any]:
    decoded = decode_text(text, "sampling_parameters")
    if not isinstance(decoded, dict):
        raise problem("sampling_parameters", f"should be an object, got {describe(decoded)}")
    return {
        key: msgspec.json.decode(value)
        if isinstance(value, str) and key not in _TEXTS and _NUMBER.fullmatch(value)
        else value
        for key, value in decoded.items()
    }


def decode_infer(header_length: int | None, raw: bytes) -> dict[str, Any]:
    """The JSON of an inference request, with the tensors that follow it as bytes. `header_length`
    is the length of the JSON, None if no bytes follow.
    """
    if header_length is None:
        return decode_object(raw)
    body = decode_object(raw[:header_length])
    start = header_length
    inputs = body.get("inputs")
    for position, tensor in enumerate(inputs if isinstance(inputs, list) else ()):
        where = f"inputs[{position}]"
        parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw) - start:
            rule = f"should be a size of the bytes that follow, got {describe(size)}"
            raise problem(f"{where}.parameters.binary_data_size", rule)
        shape, datatype = tensor.get("shape"), tensor.get("datatype")
        if not isinstance(shape, list) or not all(type(each) is int for each in shape):
            raise problem(f"{where}.shape", f"should be a list of integers, got {describe(shape)}")
        count = tensors.count_of(shape, where)
        tensor["data"] = tensors.from_raw(datatype, raw[start : start + size], count, where)
        start += size
    if start != len(raw):
        raise problem("inputs", f"{len(raw) - start} bytes of the body belong to no tensor")
    return body


def _parse_texts(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= fields.MAX_PROMPTS:
        rule = f"should be a text or 1 to {fields.MAX_PROMPTS} texts"
        raise problem(PROMPT, f"{rule}, got {describe(value)}")
    for each in value:
        if not isinstance(each, str):
            raise problem(PROMPT, f"should be a text, got {describe(each)}")
    return tuple(value)


_TEXT_SCHEMA = {"type": "string"}


class TextBody(SamplingBody):
    """The body of `generate`, and the tensors of `infer`."""

    text_input: Annotated[
        str | tuple[str, ...],
        PlainValidator(_parse_texts),
        WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA}]}),
    ]
    id: Id = ""
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    parse_special: bool | None = None
    structured_outputs: fields.StructuredOutputs = None

    @model_validator(mode="after")
    def _one_answer(self) -> "TextBody":
        if self.num_choices != 1:
            raise problem("n", "should be 1: each text has one answer")
        return self

    @property
    def prompts(self) -> tuple[str, ...]:
        return (self.text_input,) if isinstance(self.text_input, str) else self.text_input

    @property
    def echoes(self) -> bool:
        return self.exclude_input_in_output is False

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the outputs that the client wants."""
        asked = {
            "finish_reason": self.return_finish_reason,
            "num_input_tokens": self.return_num_input_tokens,
            "num_output_tokens": self.return_num_output_tokens,
        }
        return ("text_output", *(name for name, is_asked in asked.items() if is_asked))

    def params(self, card: ModelCard) -> SamplingParams:
        return self.sampling(card, self.max_tokens, None, default_limit=DEFAULT_TOKENS)


# Maps paths to the JSON body of a POST, for the OpenAPI document.
BODIES: dict[str, type[BaseModel]] = {
    f"/v2/models/{{name}}{version}/{operation}": kind
    for version in ("", "/versions/{version}")
    for operation, kind in (
        ("infer", InferBody),
        ("generate", TextBody),
        ("generate_stream", TextBody),
    )
}
