"""The options of `engine serve`, under the headings of its help. `engine node join` shares those
that concern the engine.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cli.console import BackendOption, DeviceOption, DtypeOption, complete_model

_MODEL, _SERVER, _MEMORY, _LOGS = "Model", "Server", "Memory and speed", "Logs"
# The flags after the first one of an option are those of vLLM, SGLang or llama.cpp.
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        "--model-path",
        rich_help_panel=_MODEL,
        help="The model: a name, a file, a folder or ORG/REPO[:QUANT].",
        autocompletion=complete_model,
    ),
]
HubOption = Annotated[
    str | None,
    typer.Option(
        "--hf-repo",
        "-hf",
        "-hfr",
        metavar="ORG/REPO[:QUANT]",
        rich_help_panel=_MODEL,
        help="MODEL from the hub.",
    ),
]
HostOption = Annotated[
    str | None, typer.Option(rich_help_panel=_SERVER, help="Address to listen on.")
]
PortOption = Annotated[
    int | None,
    typer.Option(rich_help_panel=_SERVER, help="Port to listen on; 0: any free one."),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        "--served-model-name",
        "--alias",
        "-a",
        rich_help_panel=_MODEL,
        help="Model id that clients use.",
    ),
]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        rich_help_panel=_MODEL,
        help="Option of a backend other than our own, such as python=/opt/vllm/bin/python;"
        " can be repeated.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        "--lora-modules",
        metavar="NAME=PATH",
        rich_help_panel=_MODEL,
        help="LoRA adapter that clients call NAME: a PEFT folder, a GGUF file, or an address"
        " (hf:ORG/REPO); can be repeated.",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--model-draft",
        "-md",
        "--speculative-model",
        "--speculative-draft-model-path",
        rich_help_panel=_MODEL,
        help="Small model with the same vocabulary that guesses tokens, which MODEL verifies.",
        autocompletion=complete_model,
    ),
]
MaxSequenceLengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-sequence-length",
        "--max-model-len",
        "--context-length",
        "--ctx-size",
        "-c",
        rich_help_panel=_MODEL,
        help="Context in tokens; default: the model's.",
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "--max-num-seqs",
        "--max-running-requests",
        "--parallel",
        "-np",
        rich_help_panel=_MEMORY,
        help="Most sequences computed in one step.",
    ),
]
FrontendsOption = Annotated[
    str | None,
    typer.Option(
        "--frontends",
        "--api-server-count",
        metavar="NUMBER",
        rich_help_panel=_MEMORY,
        help="Frontend processes, or `auto`: several if the engine runs on a GPU.",
    ),
]
MaxBatchTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-batch-tokens",
        "--max-num-batched-tokens",
        rich_help_panel=_MEMORY,
        help="Most tokens computed in one step.",
    ),
]
MemoryPoolSizeOption = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=_MEMORY, help="KV cache in MiB; default: planned from free memory."
    ),
]
GpuMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        rich_help_panel=_MEMORY,
        help="Share of the GPU's free memory to use; default: 0.9.",
    ),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        "--tp-size",
        "--tp",
        rich_help_panel=_MEMORY,
        help="Ranks that share each layer: one GPU each, or a process on CPUs.",
    ),
]
PipelineParallelOption = Annotated[
    int | None,
    typer.Option(
        "--pipeline-parallel-size",
        "-pp",
        "--pp-size",
        rich_help_panel=_MEMORY,
        help="Stages that the layers are divided into.",
    ),
]
CacheOption = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        rich_help_panel=_MEMORY,
        help="Share common prefixes.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", rich_help_panel=_MEMORY, help="CPU threads for the model."),
]
AffinityOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_MEMORY,
        help="CPUs to bind the native threads to: auto, off or 0-3,8.",
    ),
]
NumericsOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_MEMORY,
        help="invariant: answers never depend on other requests; fast: they may; auto: invariant"
        " on the native backend.",
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        "-q",
        rich_help_panel=_MODEL,
        help="Weights as fp8 or int8, on a GPU; auto: as they are stored.",
    ),
]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        rich_help_panel=_MEMORY,
        help="Keys and values as auto, float32, bfloat16, int8 (CPU) or fp8 (GPU).",
    ),
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        "--role",
        rich_help_panel=_MEMORY,
        help="prefill: compute long prompts for decode nodes; decode: fetch these; both: all work.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        rich_help_panel=_SERVER,
        help="The API key. Other users of this machine can see it; prefer --api-key-file.",
    ),
]
InsecureNoAuthOption = Annotated[
    bool | None,
    typer.Option(
        "--insecure-no-auth", rich_help_panel=_SERVER, help="Serve other machines without a key."
    ),
]
StrictOption = Annotated[
    bool | None,
    typer.Option(
        "--strict",
        rich_help_panel=_SERVER,
        help="Refuse what would be emulated or clamped, with 400.",
    ),
]
UiOption = Annotated[
    bool | None,
    typer.Option(
        "--ui/--no-ui",
        "--webui/--no-webui",
        rich_help_panel=_SERVER,
        help="Serve the web page at /.",
    ),
]
StoragePathOption = Annotated[
    Path | None,
    typer.Option(rich_help_panel=_SERVER, help="Directory of stored responses, files and batches."),
]
LogLevelOption = Annotated[
    str | None, typer.Option(rich_help_panel=_LOGS, help="debug, info, warning or error.")
]
LogFormatOption = Annotated[str | None, typer.Option(rich_help_panel=_LOGS, help="pretty or json.")]

# The options that concern the engine, by the names of their settings.
ENGINE_OPTIONS: dict[str, Any] = {
    "model.draft_model": DraftModelOption,
    "model.backend": BackendOption,
    "model.device": DeviceOption,
    "model.dtype": DtypeOption,
    "model.max_sequence_length": MaxSequenceLengthOption,
    "model.quantization": QuantizationOption,
    "performance.batch_size": BatchSizeOption,
    "performance.max_batch_tokens": MaxBatchTokensOption,
    "performance.memory_pool_size_mb": MemoryPoolSizeOption,
    "performance.gpu_memory_utilization": GpuMemoryOption,
    "performance.tensor_parallel_size": TensorParallelOption,
    "performance.pipeline_parallel_size": PipelineParallelOption,
    "cache.enabled": CacheOption,
    "performance.threads": ThreadsOption,
    "performance.affinity": AffinityOption,
    "performance.numerics": NumericsOption,
    "cache.kv_dtype": KvDtypeOption,
    "nodes.role": RoleOption,
    "logging.level": LogLevelOption,
    "logging.format": LogFormatOption,
}
# The names of parameters that differ from those of their settings.
_RENAMED = {
    "cache.enabled": "cache",
    "logging.level": "log_level",
    "logging.format": "log_format",
}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that concern the engine. Its parameter `engine` gets them as a
    dict, by the names of their settings.
    """
    names = {key: _RENAMED.get(key, key.partition(".")[2]) for key in ENGINE_OPTIONS}
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ENGINE_OPTIONS[key]
        )
        for key, name in names.items()
    ]

    @functools.wraps(command)
    def with_shared(**given: Any) -> None:
        engine = {key: given.pop(name) for key, name in names.items()}
        command(**given, engine=engine)

    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in inspect.signature(command).parameters.items()
        if name != "engine"
    ]
    with_shared.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    with_shared.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    return with_shared
