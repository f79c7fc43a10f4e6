"""The messages of the Open Inference Protocol's gRPC service, as a table of fields.

The classes are built from the table at import, so no generated code depends on a version of the
compiler. They have a descriptor pool of their own, because the pool of the process refuses a second
definition of these messages, and Triton's client defines them too.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
_PARAMETERS = "map InferParameter"
# Message → fields as "name: type", in the order of their numbers, which start at 1. The type
# `map X` is a map from strings. Messages with a dot are nested ones.
MESSAGES = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("live: bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("ready: bool",),
    "ModelReadyRequest": ("name: string", "version: string"),
    "ModelReadyResponse": ("ready: bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("name: string", "version: string", "extensions: repeated string"),
    "ModelMetadataRequest": ("name: string", "version: string"),
    "ModelMetadataResponse": (
        "name: string",
        "versions: repeated string",
        "platform: string",
        "inputs: repeated ModelMetadataResponse.TensorMetadata",
        "outputs: repeated ModelMetadataResponse.TensorMetadata",
    ),
    "ModelMetadataResponse.TensorMetadata": (
        "name: string",
        "datatype: string",
        "shape: repeated int64",
    ),
    "InferParameter": (
        "bool_param: oneof bool",
        "int64_param: oneof int64",
        "string_param: oneof string",
        "double_param: oneof double",
        "uint64_param: oneof uint64",
    ),
    "InferTensorContents": (
        "bool_contents: repeated bool",
        "int_contents: repeated int32",
        "int64_contents: repeated int64",
        "uint_contents: repeated uint32",
        "uint64_contents: repeated uint64",
        "fp32_contents: repeated float",
        "fp64_contents: repeated double",
        "bytes_contents: repeated bytes",
    ),
    "ModelInferRequest": (
        "model_name: string",
        "model_version: string",
        "id: string",
        f"parameters: {_PARAMETERS}",
        "inputs: repeated ModelInferRequest.InferInputTensor",
        "outputs: repeated ModelInferRequest.InferRequestedOutputTensor",
        "raw_input_contents: repeated bytes",
    ),
    "ModelInferRequest.InferInputTensor": (
        "name: string",
        "datatype: string",
        "shape: repeated int64",
        f"parameters: {_PARAMETERS}",
        "contents: InferTensorContents",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": (
        "name: string",
        f"parameters: {_PARAMETERS}",
    ),
    "ModelInferResponse": (
        "model_name: string",
        "model_version: string",
        "id: string",
        f"parameters: {_PARAMETERS}",
        "outputs: repeated ModelInferResponse.InferOutputTensor",
        "raw_output_contents: repeated bytes",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "name: string",
        "datatype: string",
        "shape: repeated int64",
        f"parameters: {_PARAMETERS}",
        "contents: InferTensorContents",
    ),
    "ModelStreamInferResponse": ("error_message: string", "infer_response: ModelInferResponse"),
    "RepositoryIndexRequest": ("repository_name: string", "ready: bool"),
    "RepositoryIndexResponse": ("models: repeated RepositoryIndexResponse.ModelIndex",),
    "RepositoryIndexResponse.ModelIndex": (
        "name: string",
        "version: string",
        "state: string",
        "reason: string",
    ),
}
# Methods whose request and response are one message each, named after the method.
UNARY = (
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata"),
    *("ModelInfer", "RepositoryIndex"),
)


def _add_field(message: Any, number: int, description: str) -> None:
    name, _, kind = description.partition(": ")
    label, _, inner = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    elif label == "map":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key: string")
        _add_field(entry, 2, f"value: {inner}")
        inner, label = f"{message.name}.{entry.name}", "repeated"
        # The outer name of a nested message is added by `_file`, which knows it.
        field.type_name = entry.name
    if label == "repeated":
        field.label = _Field.LABEL_REPEATED
    if inner in _SCALARS:
        field.type = _SCALARS[inner]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = field.type_name or f".{PACKAGE}.{inner}"


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    made: dict[str, Any] = {}
    for name, fields in MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        message = made[outer].nested_type.add(name=inner) if outer else file.message_type.add()
        message.name = inner
        made[name] = message
        for number, description in enumerate(fields, start=1):
            _add_field(message, number, description)
        for field in message.field:
            if field.type_name and not field.type_name.startswith("."):
                field.type_name = f".{PACKAGE}.{name}.{field.type_name}"
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES = _classes()
