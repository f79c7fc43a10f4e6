"""Builds the report of `engine inspect` about a model, as plain data and as tables.

Metadata comes from untrusted files. It is shown as text without control characters, and long values
are truncated.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from engine.architectures.base import ModelConfig
    from engine.weights.lazy_tensor import LazyTensor
    from engine.weights.model import ModelFiles, ModelSource

# Bytes per number; the report estimates the memory for each of these types.
DTYPES = {"bfloat16": 2, "float32": 4}
_MAX_ITEMS = 8
_MAX_TEXT = 120


def describe(source: "ModelSource", context: int, batch: int) -> dict[str, Any]:
    """The report as JSON-compatible data. Sizes are in bytes. The memory estimate is for `batch`
    sequences of `context` tokens each.
    """
    config = source.config
    tensors = source.checkpoint.tensors
    num_values = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    num_params = sum(num_values.values())
    return {
        "path": str(source.path),
        "format": source.checkpoint.format,
        "size": source.size_bytes,
        "architecture": config.family,
        "parameters": num_params,
        "quantization": source.quantization,
        "types": _type_mix(tensors.values(), num_values),
        "context_length": config.encoder.max_tokens if config.encoder else config.max_position,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "latent_dim": None if config.latent is None else config.latent.kv_rank,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_embeddings,
        "memory": {
            "context": context,
            "batch": batch,
            "weights_as_stored": sum(tensor.nbytes for tensor in tensors.values()),
            **{
                dtype: _memory(
                    num_params * width,
                    config.kv_bytes_per_token(width),
                    context * batch,
                    4 * config.state_floats * batch,
                )
                for dtype, width in DTYPES.items()
            },
        },
        "here": _here(
            sum(tensor.nbytes for tensor in tensors.values()),
            sum(file.size for file in source.checkpoint.files),
            config.kv_bytes_per_token(DTYPES["bfloat16"]) * context * batch,
            _active_share(config),
        ),
        "metadata": {key: _plain(value) for key, value in source.metadata.items()},
        "tensors": _tensor_rows(tensors.values()),
    }


def _active_share(config: "ModelConfig") -> float:
    """About the part of the weights that a token reads: with experts, the chosen ones."""
    experts = config.experts
    return 1.0 if experts is None else experts.per_token / experts.count


def _here(weights: int, files: int, kv_cache: int, active: float) -> dict[str, Any]:
    """Whether the model fits this machine, and an estimate of its speed for one sequence. The speed
    is None on a GPU, whose memory is not measured. `files` is the size that `engine list` knows.
    """
    from engine.cli.machine_speed import tokens_per_second, weight_rate
    from engine.core.store.fit import this_machine

    machine = this_machine()
    needs, is_gpu = weights + kv_cache, machine.is_gpu
    rate = None if is_gpu else weight_rate()
    speed = None if rate is None else tokens_per_second(files * active, rate)
    return {
        "fits": needs <= machine.usable,
        "needs": needs,
        "usable": machine.usable,
        "machine": machine.describe(),
        "tokens_per_s": speed,
    }


def describe_stored(stored: "ModelFiles") -> dict[str, Any]:
    """The report about a model that the engine's own frameworks cannot run."""
    tensors = stored.checkpoint.tensors
    num_values = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    return {
        "path": str(stored.path),
        "format": stored.checkpoint.format,
        "size": sum(tensor.nbytes for tensor in tensors.values()),
        "architecture": stored.unsupported,
        "supported": False,
        "parameters": sum(num_values.values()),
        "types": _type_mix(tensors.values(), num_values),
        "metadata": {key: _plain(value) for key, value in stored.metadata.items()},
        "tensors": _tensor_rows(tensors.values()),
    }


def _tensor_rows(tensors: Iterable["LazyTensor"]) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "type": tensor.dtype,
            "bytes": tensor.nbytes,
        }
        for tensor in tensors
    ]


def _memory(weights: int, kv_per_token: int, num_tokens: int, states: int) -> dict[str, int]:
    kv_cache = kv_per_token * num_tokens
    return {
        "weights": weights,
        "kv_per_token": kv_per_token,
        "kv_cache": kv_cache,
        "states": states,
        "total": weights + kv_cache + states,
    }


def _type_mix(tensors: Iterable[Any], num_values: dict[str, int]) -> dict[str, dict[str, int]]:
    """For each storage type: the number of tensors, of parameters and of bytes. The type with the
    most bytes comes first.
    """
    counts: Counter[str] = Counter()
    params: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += 1
        params[tensor.dtype] += num_values[tensor.name]
        sizes[tensor.dtype] += tensor.nbytes
    return {
        dtype: {"tensors": counts[dtype], "parameters": params[dtype], "bytes": size}
        for dtype, size in sizes.most_common()
    }


def _plain(value: Any) -> Any:
    """Convert a metadata value for JSON. Numpy values are converted, and long arrays are reduced to
    their length and first entries.
    """
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        items = [_plain(item) for item in value[:_MAX_ITEMS]]
        return items if len(value) <= _MAX_ITEMS else {"count": len(value), "first": items}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def print_summary(console: Console, report: dict[str, Any]) -> None:
    console.print(_summary_table(report))


def print_report(console: Console, report: dict[str, Any], *, list_tensors: bool) -> None:
    print_summary(console, report)
    console.print(_metadata_table(report["metadata"]))
    if list_tensors:
        console.print(_tensor_table(report["tensors"]))
    console.print(_type_table(report["types"]))
    console.print(_memory_table(report["memory"]))


def print_stored(console: Console, report: dict[str, Any], *, list_tensors: bool) -> None:
    table = Table("", title="Model", title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    rows = {
        "file": report["path"],
        "format": f"{report['format']}, {human_bytes(report['size'])} of weights",
        "architecture": f"{report['architecture']} (not supported)",
        "parameters": human_count(report["parameters"]),
    }
    for label, value in rows.items():
        table.add_row(label, _shown(value))
    console.print(table)
    console.print(_metadata_table(report["metadata"]))
    if list_tensors:
        console.print(_tensor_table(report["tensors"]))
    console.print(_type_table(report["types"]))


def _summary_table(report: dict[str, Any]) -> Table:
    table = Table("", title="Model", title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    heads = f"{report['heads']} of {report['head_dim']}, {report['kv_heads']} for keys and values"
    if report["latent_dim"] is not None:
        heads = f"{report['heads']}; the cache has a latent of {report['latent_dim']} for all"
    rows = {
        "file": report["path"],
        "format": f"{report['format']}, {human_bytes(report['size'])} of weights",
        "architecture": report["architecture"],
        "parameters": human_count(report["parameters"]),
        "quantization": report["quantization"] or "none",
        "context length": f"{report['context_length']:,}",
        "layers": str(report["layers"]),
        "hidden size": f"{report['hidden_size']:,}",
        "heads": heads,
        "feed-forward": f"{report['intermediate_size']:,}",
        "vocabulary": f"{report['vocab_size']:,}"
        + (" (embeddings tied)" if report["tied_embeddings"] else ""),
    }
    rows |= _verdict(report["here"], report["memory"])
    for label, value in rows.items():
        table.add_row(label, _shown(value))
    return table


def _verdict(here: dict[str, Any], memory: dict[str, Any]) -> dict[str, str]:
    """Whether the model fits this machine with its stored weights and a 16-bit KV cache, and how
    fast it is.
    """
    from engine.cli.machine_speed import speed_text

    tokens = f"{memory['batch']} x {memory['context']:,} tokens"
    needs, usable = human_bytes(here["needs"]), human_bytes(here["usable"])
    fits = "yes" if here["fits"] else "no"
    speed = here["tokens_per_s"]
    return {
        "fits here": f"{fits}: {needs} with {tokens}; {usable} of {here['machine']} are usable",
        "speed here": "-" if speed is None else f"about {speed_text(speed)} tok/s for one sequence",
    }


def _metadata_table(metadata: dict[str, Any]) -> Table:
    table = Table("key", "value", title="Metadata", title_justify="left")
    for key, value in metadata.items():
        table.add_row(_shown(key), _shown(value))
    return table


def _tensor_table(tensors: list[dict[str, Any]]) -> Table:
    table = Table("tensor", "shape", "type", title="Tensors", title_justify="left")
    table.add_column("size", justify="right")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(_shown(tensor["name"]), shape, tensor["type"], human_bytes(tensor["bytes"]))
    return table


def _type_table(types: dict[str, dict[str, int]]) -> Table:
    table = Table("type", title="Stored as", title_justify="left")
    for column in ("tensors", "parameters", "size", "bits per weight"):
        table.add_column(column, justify="right")
    for dtype, share in types.items():
        bits = f"{8 * share['bytes'] / max(1, share['parameters']):.2f}"
        size = human_bytes(share["bytes"])
        table.add_row(dtype, str(share["tensors"]), human_count(share["parameters"]), size, bits)
    return table


def _memory_table(memory: dict[str, Any]) -> Table:
    tokens = f"{memory['batch']} x {memory['context']:,} tokens"
    table = Table("memory", title=f"Estimate for {tokens}", title_justify="left")
    for dtype in DTYPES:
        table.add_column(dtype, justify="right")
    labels = {
        "weights": f"weights (as stored: {human_bytes(memory['weights_as_stored'])})",
        "kv_per_token": "keys and values, per token",
        "kv_cache": f"keys and values, {tokens}",
        "states": f"states of {memory['batch']} sequences",
        "total": "total",
    }
    if not any(memory[dtype]["states"] for dtype in DTYPES):
        del labels["states"]
    for key, label in labels.items():
        table.add_row(label, *(human_bytes(memory[dtype][key]) for dtype in DTYPES))
    return table


def _shown(value: Any) -> Text:
    if isinstance(value, dict) and set(value) == {"count", "first"}:
        text = f"[{value['count']:,} items: {', '.join(map(str, value['first'][:4]))}, ...]"
    else:
        text = str(value)
    clean = "".join(each if each.isprintable() else " " for each in text[: _MAX_TEXT + 1])
    return Text(clean if len(clean) <= _MAX_TEXT else f"{clean[:_MAX_TEXT]}...")


def human_bytes(size: int) -> str:
    """The size in decimal units, such as 98.4 MB."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def human_count(count: int) -> str:
    return _scaled(count, ("", "K", "M", "B", "T"))


def _scaled(value: int, units: tuple[str, ...]) -> str:
    scale = 0
    while value >= 1000 ** (scale + 1) and scale < len(units) - 1:
        scale += 1
    digits = f"{value:,}" if scale == 0 else f"{value / 1000**scale:.1f}"
    return f"{digits} {units[scale]}".strip()
