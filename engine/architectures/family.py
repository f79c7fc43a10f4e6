"""Defines `Family`: the description of a model family by its names, config keys and weights.

A field of `ModelConfig` is read from a key of the file, has the family's default, or is fixed for
the whole family. Functions read the fields that need more than one key, such as RoPE scaling rules
and sliding windows. In GGUF, some fields have no key: whether the LM head is tied, which biases
exist, and whether there are RoPE frequency factors. `weights.model` derives these fields from the
tensors of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from engine.architectures.base import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    Reader,
)
from engine.architectures.checks import check_config
from engine.architectures.foreign import (
    check_sizes,
    gguf_bos_id,
    gguf_eos_ids,
    gguf_vocab_size,
    heads_split,
    hf_activation,
    hf_bos_id,
    hf_eos_ids,
    known_activation,
    refuse_unsupported_gguf,
    refuse_unsupported_hf,
    refuse_values,
)
from engine.architectures.hybrids.states import StateConfig
from engine.architectures.rope import (
    DEFAULT_THETA,
    rope_from_gguf,
    rope_from_hf,
    stretched_position,
)
from engine.architectures.tensors import TensorSpec
from engine.architectures.weight_rows import WeightRow
from engine.core.errors import ModelFormatError

# A key of the file -> the config fields that it sets. "experts.count" is a field of
# `ModelConfig.experts`. "1/logits_scaling": the key has the reciprocal of the field.
Keys = dict[str, str | tuple[str, ...]]
Settings = Mapping[str, Any]  # values of `ModelConfig` fields, by field name
# A function that reads config fields which need more than one key. It gets a reader of the file's
# keys and the fields read so far. It returns additional fields.
More = Callable[[Reader, Settings], Settings]

REQUIRED: Any = object()
_BOOLS = frozenset(
    {
        *("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias"),
        *("experts.renormalizes", "state.conv_bias", "state.proj_bias"),
    }
)
FLOATS = frozenset(
    {
        "norm_eps",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "attention_softcap",
        "logits_softcap",
        "alibi_bias",
    }
)
# Defaults of fields that a file of any family may omit.
_DEFAULTS: Mapping[str, Any] = {
    "num_kv_heads": lambda found: found["num_heads"],
    "head_dim": lambda found: heads_split(found["hidden_size"], found["num_heads"]),
    "tie_embeddings": False,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "attention_softcap": None,
    "logits_softcap": None,
    "experts.count": 0,
    "experts.per_token": 0,
    "experts.size": lambda found: found.get("intermediate_size", 0),
    "experts.shared_size": 0,
    "experts.renormalizes": False,
    "experts.scale": 1.0,
    "experts.groups": 1,
    "experts.groups_per_token": 1,
    "latent.q_rank": None,
}


def _nothing(*_: Any) -> Settings:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """The description of a model family. Its keys serve to read files, and to write them in `engine
    convert`.
    """

    name: str
    hf_names: tuple[str, ...]
    gguf_names: tuple[str, ...]
    weights: tuple[WeightRow, ...]
    hf_keys: Keys
    # GGUF keys without the architecture prefix, such as "llama.". None means that the engine cannot
    # read GGUF files of this family.
    gguf_keys: Keys | None
    # The config.json key that names the activation, and the default if the file lacks this key.
    hf_activation: tuple[str, str] = ("hidden_act", "silu")
    always: Settings = field(default_factory=dict)  # fields fixed for all models of the family
    # Defaults of fields whose key a file may omit. The value REQUIRED removes a default that all
    # families share, so that every file of this family must have the key.
    defaults: Settings = field(default_factory=dict)
    hf_defaults: Settings = field(default_factory=dict)  # those that apply to config.json only
    # For some config.json keys, a value that is not implemented. A config with it is rejected.
    hf_refused: Mapping[str, Any] = field(default_factory=dict)
    hf_more: More = _nothing
    gguf_more: More = _nothing
    # RoPE's base and the rotated part of each head, if config.json does not state them.
    theta: float = DEFAULT_THETA
    rotated: float = 1.0
    # Whether layers with and without a window may have different RoPE settings.
    has_local_rope: bool = False
    # Renames or flattens keys of config.json before they are read.
    hf_view: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    # For writing a config.json: the names of the architecture and of the model type of a model.
    # None: the first of `hf_names`, and the family's name.
    hf_kind: Callable[[ModelConfig], tuple[str, str]] | None = None
    # For writing files: keys that are not plain fields, and their values.
    hf_written: Callable[[ModelConfig], Settings] = _nothing
    gguf_written: Callable[[ModelConfig], Settings] = _nothing

    def config_from_hf(self, config: Mapping[str, Any]) -> ModelConfig:
        config = self.hf_view(config)
        refuse_unsupported_hf(config, self._has_experts)
        refuse_values(config, self.hf_refused)
        reader = Reader(config, "config.json")
        found = self._read(reader, self.hf_keys, dict(self.always), self.hf_defaults)
        if "activation" not in found:
            found["activation"] = hf_activation(reader, *self.hf_activation)
        if "rope" not in found:
            length = found["max_position"]
            found["rope"] = rope_from_hf(
                config,
                _rotary_head(found),
                length,
                self.theta,
                self.rotated,
                "full_attention" if self.has_local_rope else None,
            )
            found["max_position"] = stretched_position(found["rope"], length)
        found["bos_id"] = hf_bos_id(config, found["vocab_size"])
        found["eos_ids"] = hf_eos_ids(config, found["vocab_size"])
        check_sizes(found)
        found |= self.hf_more(reader, found)
        return check_config(ModelConfig(family=self.name, **found))

    def config_from_gguf(self, metadata: Mapping[str, Any]) -> ModelConfig:
        if self.gguf_keys is None:
            raise ModelFormatError(
                f"{self.name} models are read from safetensors only; use the model's Hugging Face "
                "directory"
            )
        refuse_unsupported_gguf(metadata, self._has_experts)
        reader = Reader(metadata, "GGUF metadata")
        prefix = reader.read(str, "general.architecture")
        keys = {f"{prefix}.{key}": name for key, name in self.gguf_keys.items()}
        known = {**self.always, "vocab_size": gguf_vocab_size(metadata)}
        found = self._read(reader, keys, known, {})
        found.setdefault("activation", known_activation(self.hf_activation[1]))
        if "rope" not in found:
            length = found["max_position"]
            found["rope"] = rope_from_gguf(metadata, _rotary_head(found), length)
            found["max_position"] = stretched_position(found["rope"], length)
        # GGUF files state 0 for models without a sliding window.
        window = reader.read(int, f"{prefix}.attention.sliding_window", default=0)
        found["sliding_window"] = window or None
        found["bos_id"] = gguf_bos_id(metadata, found["vocab_size"])
        found["eos_ids"] = gguf_eos_ids(metadata, found["vocab_size"])
        check_sizes(found)
        found |= self.gguf_more(reader, found)
        return check_config(ModelConfig(family=self.name, **found))

    @property
    def _has_experts(self) -> bool:
        return "experts.count" in (*self.hf_keys.values(), *self.always)

    def tensors(self, config: ModelConfig) -> tuple[TensorSpec, ...]:
        """All weights of a model with this config, in layer order."""
        specs: list[TensorSpec] = []
        for in_layer, group in groupby(self.weights, key=lambda row: "{i}" in row.name):
            rows = list(group)
            for layer in range(config.num_layers if in_layer else 1):
                for row in rows:
                    specs.extend(row.specs(config, layer))
        return tuple(specs)

    def _read(
        self,
        reader: Reader,
        keys: Keys,
        found: dict[str, Any],
        defaults: Settings,
    ) -> dict[str, Any]:
        """Returns `found`, completed with the values of `keys` and with defaults. If several keys
        set the same field, the first of them that is in the file counts.
        """
        defaults = {**_DEFAULTS, **self.defaults, **defaults}
        for key, fields in keys.items():
            names = (fields,) if isinstance(fields, str) else fields
            first = names[0].removeprefix("1/")
            if first in found:
                continue
            is_float = first in FLOATS or first == "experts.scale"
            kind = bool if first in _BOOLS else float if is_float else int
            if defaults.get(first, REQUIRED) is REQUIRED:
                value: Any = reader.read(kind, key)
            else:
                value = reader.read(kind, key, default=None)
            if value is not None and names[0] != first:
                value = 1 / value if value > 0 else 0.0
            if value is not None:
                found |= dict.fromkeys((first, *names[1:]), value)
        for name, default in defaults.items():
            if name not in found:
                found[name] = default(found) if callable(default) else default
        return _with_parts(found)


def _rotary_head(found: Settings) -> int:
    """The part of a head that RoPE may rotate."""
    latent: LatentConfig | None = found["latent"]
    size: int = found["head_dim"] if latent is None else latent.rope_dim
    return size


def _with_parts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Collects the fields "experts.*" into one `ExpertsConfig`, "latent.*" into one `LatentConfig`
    and "state.*" into one `StateConfig`.
    """
    fields = {key: value for key, value in found.items() if "." not in key}
    experts, latent, state = (
        {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        for prefix in ("experts.", "latent.", "state.")
    )
    fields["experts"] = ExpertsConfig(**experts) if experts["count"] else None
    fields["latent"] = LatentConfig(**latent) if "kv_rank" in latent else None
    return {**fields, "state": StateConfig(**state) if state else None}
