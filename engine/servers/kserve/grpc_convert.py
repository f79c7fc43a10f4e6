"""Converts between the gRPC messages and the JSON bodies of the Open Inference Protocol."""

from typing import Any

from engine.servers.http.errors import problem
from engine.servers.kserve import tensors
from engine.servers.kserve.answers import OUTPUTS, VERSION
from engine.servers.kserve.grpc_messages import CLASSES
from engine.servers.kserve.schema import PROMPT, InferBody
from engine.servers.schema.body import validated

EMPTY_END = "triton_enable_empty_final_response"
MAX_NAME_LENGTH = 1024
MAX_TENSORS = 64
MAX_PARAMETERS = 256
MAX_DIMENSIONS = 8
IS_FINAL = "triton_final_response"
# Data type → field of InferTensorContents.
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def model_path(name: str, version: str) -> str:
    if len(name) > MAX_NAME_LENGTH or len(version) > MAX_NAME_LENGTH:
        where = "model_name" if len(name) > MAX_NAME_LENGTH else "model_version"
        raise problem(where, f"should have at most {MAX_NAME_LENGTH} characters")
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def path_of(request: Any, operation: str) -> str:
    return f"{model_path(request.model_name, request.model_version)}/{operation}"


def to_json(request: Any) -> dict[str, Any]:
    """A ModelInferRequest as the JSON of `infer`."""
    for field in ("inputs", "outputs"):
        if len(getattr(request, field)) > MAX_TENSORS:
            raise problem(field, f"should have at most {MAX_TENSORS} tensors")
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        rule = f"should have one entry for each of {len(request.inputs)} inputs, has {len(raws)}"
        raise problem("raw_input_contents", rule)
    return {
        "id": request.id,
        "parameters": _values(request.parameters),
        "inputs": [
            {
                "name": tensor.name,
                "shape": _shape(tensor, f"inputs[{index}]"),
                "datatype": tensor.datatype,
                "data": _data(tensor, raws[index] if raws else None, f"inputs[{index}]"),
            }
            for index, tensor in enumerate(request.inputs)
        ],
        "outputs": [{"name": each.name} for each in request.outputs],
    }


def _shape(tensor: Any, where: str) -> list[int]:
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise problem(f"{where}.shape", f"should have at most {MAX_DIMENSIONS} dimensions")
    return list(tensor.shape)


def _values(parameters: Any) -> dict[str, Any]:
    if len(parameters) > MAX_PARAMETERS:
        raise problem("parameters", f"should be at most {MAX_PARAMETERS}")
    return {
        name: getattr(each, each.WhichOneof("parameter_choice"))
        for name, each in parameters.items()
        if each.WhichOneof("parameter_choice") is not None
    }


def _data(tensor: Any, raw: bytes | None, where: str) -> list[Any]:
    if raw is not None:
        count = tensors.count_of(_shape(tensor, where), where)
        return tensors.from_raw(tensor.datatype, raw, count, where)
    if tensor.datatype not in CONTENTS:
        raise problem(f"{where}.datatype", "should be sent in raw_input_contents")
    found = getattr(tensor.contents, CONTENTS[tensor.datatype])
    if len(found) > tensors.MAX_ELEMENTS:
        raise problem(f"{where}.contents", f"should have at most {tensors.MAX_ELEMENTS} elements")
    elements = list(found)
    if tensor.datatype == "BYTES":
        return [tensors.text_of(each, where) for each in elements]
    return elements


def streamed_words(body: dict[str, Any]) -> dict[str, Any] | None:
    """The body of `generate_stream` for a request that wants a stream. None for other requests."""
    asked = validated(InferBody, body)
    words = asked.words()
    if not words.get("stream"):
        return None
    if len(words[PROMPT]) == 1:
        words[PROMPT] = words[PROMPT][0]
    wanted = {each.name for each in asked.outputs} or OUTPUTS.keys()
    flags = {f"return_{name}": True for name in OUTPUTS if name in wanted and name != "text_output"}
    return {"id": asked.id} | words | flags


def wants_empty_end(body: dict[str, Any]) -> bool:
    return body["parameters"].get(EMPTY_END) is True


def from_json(made: dict[str, Any]) -> Any:
    """The JSON of an `infer` answer as a ModelInferResponse. Its tensors are raw, which is the form
    that Triton's clients read fastest.
    """
    outputs = made["outputs"]
    return CLASSES["ModelInferResponse"](
        model_name=made["model_name"],
        model_version=made["model_version"],
        id=made.get("id", ""),
        outputs=[
            {"name": each["name"], "datatype": each["datatype"], "shape": each["shape"]}
            for each in outputs
        ],
        raw_output_contents=[tensors.to_raw(each["datatype"], each["data"]) for each in outputs],
    )


def from_event(event: dict[str, Any], request_id: str) -> dict[str, Any]:
    """An event of `generate_stream` as the JSON of an `infer` answer."""
    outputs = [
        {"name": name, "datatype": datatype, "shape": [1], "data": [event[name] or ""]}
        if datatype == "BYTES"
        else {"name": name, "datatype": datatype, "shape": [1], "data": [event[name]]}
        for name, datatype in OUTPUTS.items()
        if name in event
    ]
    head = {name: event[name] for name in ("model_name", "model_version")}
    return head | {"id": request_id, "outputs": outputs}


def stream_response(made: dict[str, Any], *, is_final: bool) -> Any:
    response = from_json(made)
    response.parameters[IS_FINAL].bool_param = is_final
    return CLASSES["ModelStreamInferResponse"](infer_response=response)


def empty_end(request: Any) -> Any:
    response = CLASSES["ModelInferResponse"](
        model_name=request.model_name, model_version=VERSION, id=request.id
    )
    response.parameters[IS_FINAL].bool_param = True
    return CLASSES["ModelStreamInferResponse"](infer_response=response)


def stream_error(message: str, request_id: str) -> Any:
    made = CLASSES["ModelStreamInferResponse"](error_message=message)
    made.infer_response.id = request_id
    return made
