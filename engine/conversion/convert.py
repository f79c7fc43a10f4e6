"""Converts a model from any supported format to any other.

The output has a temporary name until it is complete. An existing file is never replaced.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.adapters.reading import open_adapter
from engine.architectures.base import ModelConfig, RopeConfig
from engine.architectures.export import (
    gguf_metadata,
    hf_config,
    llama3_rules,
    text_only,
)
from engine.architectures.family import FLOATS
from engine.architectures.foreign import has_images
from engine.architectures.rope import LONG_FACTORS
from engine.conversion.gguf_writer import (
    GGUF_TYPES,
    file_type,
    gguf_bytes,
    gguf_size,
    gguf_type,
)
from engine.conversion.importance import read_importance
from engine.conversion.llama2c import (
    llama2c_bytes,
    llama2c_size,
    open_llama2c,
    read_tokenizer,
    tokenizer_bytes,
)
from engine.conversion.merging import MERGED_TYPE, merged
from engine.conversion.stored import (
    EMPTY,
    PLAIN_TYPES,
    Bytes,
    TargetTensor,
    most_bytes,
    plain_type,
    stored_array,
    stored_tensors,
)
from engine.conversion.writing import Progress, new_place, write_pieces
from engine.core.errors import ConfigError, ModelFormatError
from engine.core.store.checkpoint_files import is_companion
from engine.core.text.tokenizer_to_gguf import gguf_tokenizer
from engine.core.text.tokenizer_to_json import tokenizer_files
from engine.ir.rotary import inverse_frequencies
from engine.weights.files import member, read_json
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import CONFIG_NAME, ModelSource, open_model
from engine.weights.quantize import quantize
from engine.weights.quants import dequantize
from engine.weights.safetensors import SINGLE_NAME
from engine.weights.weight import Weight

_SAFETENSORS_ALIGNMENT = 8


def safetensors_bytes(
    tensors: Sequence[TargetTensor], metadata: Mapping[str, str]
) -> Iterator[Bytes]:
    """Yields the content of a safetensors file, in chunks. `metadata` goes into the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _SAFETENSORS_ALIGNMENT)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    for tensor in tensors:
        yield from tensor.pieces()


Format = Literal["gguf", "safetensors", "llama2c"]
Importance = Mapping[str, NDArray[np.float32]]

TOKENIZER_NAME = "tokenizer.bin"
_FACTORS = "rope_freqs.weight"
_GENERAL = "gguf_general"  # key in config.json under which GGUF's `general.*` metadata are kept
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SUFFIXES: dict[str, Format] = {".gguf": "gguf", ".bin": "llama2c", "": "safetensors"}


def convert(
    source: Path,
    target: Path,
    *,
    to: Format | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    importance: Path | None = None,
    adapter: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> Format:
    """Write the model at `source` to `target`. Returns the format of the target, which is `to` or
    follows from the target's name. Without a `dtype`, weights keep their storage type if the format
    has it. `importance` is the file of an importance matrix. `adapter` is a LoRA adapter, which is
    merged into the weights.
    """
    to = to or format_of(target)
    if adapter is not None and to != "llama2c":
        dtype = dtype or MERGED_TYPE
    _check(target, to, dtype)
    if importance is not None and (to != "gguf" or dtype is None):
        raise ConfigError(
            "an importance matrix is used to quantize; give --type and a .gguf target"
        )
    columns = EMPTY if importance is None else read_importance(importance)
    with closing(open_source(source, tokenizer)) as model:
        if model.config.encoder is not None:
            raise ModelFormatError(f"{source.name} is a text encoder; only decoders are converted")
        model = replace(model, config=text_only(model.config))
        if adapter is not None:
            model = merged(model, open_adapter(adapter, model.config))
        _WRITERS[to](model, target, dtype, columns, progress)
    return to


def save_trained(
    model: ModelSource, arrays: Mapping[str, NDArray[np.float32]], target: Path
) -> None:
    """Write a model as a safetensors folder, with new values for its weights. `arrays` maps the
    engine's weight names to the values.
    """
    _check(target, "safetensors", None)
    weights = dict(model.weights)
    for name, values in arrays.items():
        spec = weights[name].spec
        tensor = LazyTensor(
            name=name,
            shape=spec.shape,
            dtype="F32",
            nbytes=values.nbytes,
            _view=partial(quantize, "F32", values),
            _dequantize=partial(dequantize, "F32"),
        )
        weights[name] = Weight(spec, (tensor,))
    trained = replace(model, weights=weights)
    _write_safetensors(trained, target, None, EMPTY, lambda done, total: None)


def format_of(target: Path) -> Format:
    found = _SUFFIXES.get(target.suffix)
    if found is None:
        raise ConfigError(
            f"the format of {target.name} cannot be told from its name; end it in .gguf or .bin, "
            "name a folder for safetensors, or say --to gguf, safetensors or llama2c"
        )
    return found


def open_source(path: Path, tokenizer: Path | None = None) -> ModelSource:
    """Open a model of any supported format. `tokenizer` is the tokenizer file of a llama2.c model.
    The default is tokenizer.bin beside the model.
    """
    if path.suffix != ".bin":
        if tokenizer is not None:
            raise ConfigError("--tokenizer belongs to a llama2.c .bin file; leave it out")
        return open_model(path)
    model = open_llama2c(path, {})
    stated = read_tokenizer(tokenizer or path.with_name(TOKENIZER_NAME), model.config.vocab_size)
    return replace(model, metadata={**model.metadata, **stated})


def _check(target: Path, to: Format, dtype: str | None) -> None:
    allowed = {"gguf": GGUF_TYPES, "safetensors": PLAIN_TYPES, "llama2c": ("F32",)}[to]
    if dtype is not None and dtype not in allowed:
        raise ConfigError(f"{to} holds {', '.join(allowed)} here, not {dtype}; choose one of them")
    if target.exists():
        raise ConfigError(f"{target} is there already; remove it, or choose another name")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {target.absolute().parent} to write into")


def _write_gguf(
    model: ModelSource, target: Path, dtype: str | None, columns: Importance, progress: Progress
) -> None:
    metadata, tensors = gguf_parts(model, dtype, columns)
    size = gguf_size(tensors)
    with new_place(target, size) as path:
        write_pieces(path, gguf_bytes(metadata, tensors), size, progress)


def _write_safetensors(
    model: ModelSource, target: Path, dtype: str | None, _: Importance, progress: Progress
) -> None:
    tensors = _hf_tensors(model, dtype)
    files = _hf_files(model, _TORCH_NAMES[most_bytes(tensors)])
    size = sum(tensor.nbytes for tensor in tensors)
    with new_place(target, size) as folder:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        write_pieces(folder / SINGLE_NAME, safetensors_bytes(tensors, {}), size, progress)


def _write_llama2c(
    model: ModelSource, target: Path, dtype: str | None, _: Importance, progress: Progress
) -> None:
    pieces = tokenizer_bytes(stated_metadata(model))
    beside = target.with_name(TOKENIZER_NAME)
    if beside.exists() and beside.read_bytes() != pieces:
        raise ConfigError(
            f"{beside} is there and belongs to another model; choose a folder without one"
        )
    size = llama2c_size(model)
    with new_place(target, size) as path:
        write_pieces(path, llama2c_bytes(model), size, progress)
    beside.write_bytes(pieces)


_WRITERS = {"gguf": _write_gguf, "safetensors": _write_safetensors, "llama2c": _write_llama2c}


def gguf_parts(
    model: ModelSource, dtype: str | None, columns: Importance = EMPTY
) -> tuple[dict[str, Any], list[TargetTensor]]:
    """The metadata and tensors for a GGUF file of the model."""
    rope = model.config.rope
    tensors = stored_tensors(
        model.weights.values(),
        "gguf",
        lambda weight: gguf_type(weight, dtype, model.config, bool(columns)),
        columns,
    )
    if rope is not None and rope.kind == "llama3":
        tensors.append(stored_array(_factors(rope), _FACTORS))
    if rope is not None and rope.kind == "longrope":
        for name, factors in zip(
            LONG_FACTORS, (rope.short_factors, rope.long_factors), strict=True
        ):
            tensors.append(stored_array(np.array(factors, np.float32), name))
    stated = stated_metadata(model)
    stated["general.file_type"] = file_type(dtype, tensors)
    stated["general.quantization_version"] = 2
    return stated, tensors


def stated_metadata(model: ModelSource) -> dict[str, Any]:
    """GGUF metadata that describe the model and its tokenizer."""
    if model.checkpoint.format == "gguf":
        return dict(model.metadata)
    config, rope = model.config, model.config.rope
    if rope is not None and rope.kind == "llama3":  # GGUF has a tensor of factors for this rule
        config = replace(config, rope=RopeConfig(rope.theta, rope.dim))
    name = Path(str(model.metadata.get("_name_or_path") or model.path.resolve())).name
    stated = {"general.type": "model", "general.name": name}
    stated |= model.metadata.get(_GENERAL, {})
    return gguf_metadata(config) | stated | gguf_tokenizer(model.path, config.vocab_size)


def _hf_tensors(model: ModelSource, dtype: str | None) -> list[TargetTensor]:
    return stored_tensors(
        model.weights.values(), "safetensors", lambda weight: plain_type(weight, dtype)
    )


def _hf_files(model: ModelSource, dtype: str) -> dict[str, bytes]:
    """The files that a Hugging Face folder has beside the weights, as file name -> content."""
    if model.checkpoint.format == "safetensors":
        files = {
            path.name: member(model.path, path.name).read_bytes()
            for path in sorted(model.path.iterdir())
            if path.is_file() and is_companion(path.name)
        }
        stated = read_json(model.path, CONFIG_NAME)
        if has_images(stated):  # only the text model is written
            return files | {CONFIG_NAME: _json(hf_config(model.config, dtype))}
        stated.pop("quantization_config", None)  # the written weights are not quantized
        stated |= {key: dtype for key in ("dtype", "torch_dtype") if key in stated}
        return files | {CONFIG_NAME: _json(stated)}
    texts = tokenizer_files(model.metadata)
    stated = hf_config(_as_published(model), dtype)
    stated[_GENERAL] = {
        key: value
        for key, value in model.metadata.items()
        if key.startswith("general.")
        and key != "general.architecture"
        and isinstance(value, str | list)
    }
    return {name: text.encode() for name, text in texts.items()} | {CONFIG_NAME: _json(stated)}


def _as_published(model: ModelSource) -> ModelConfig:
    """The config of a GGUF model as it was before the conversion to GGUF.

    GGUF stores numbers as float32. They are rounded back to the short decimals of config.json. GGUF
    stores some RoPE scaling rules as frequency factors. If the factors match a published rule, the
    rule is restored.
    """
    config = model.config
    stored = {name: getattr(config, name) for name in FLOATS}
    short: dict[str, Any] = {name: x and float(str(np.float32(x))) for name, x in stored.items()}
    config = replace(config, **short)
    if config.rope is None or config.rope.kind != "factors":
        return config
    factors = model.weights["rope.factors"].numpy()
    for rule in llama3_rules(config.rope):
        if np.allclose(_factors(rule), factors, rtol=1e-4):
            return replace(config, rope=rule)
    return config


def _factors(rope: RopeConfig) -> NDArray[np.float32]:
    """The factors by which a RoPE scaling rule divides the plain frequencies."""
    plain = RopeConfig(rope.theta, rope.dim)
    return inverse_frequencies(plain, 0) / inverse_frequencies(rope, 0)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
