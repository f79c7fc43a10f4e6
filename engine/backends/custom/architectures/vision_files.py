"""Reads the settings of an image encoder from the files of a model, and lists its weights.

Checkpoints in the Hugging Face format store the encoder beside the text model. GGUF models store it
in a file of its own, which is called "mmproj".
"""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.backends.custom.architectures.base import Reader, TensorSpec, Transform
from engine.backends.custom.architectures.vision import (
    ImageProcessing,
    VisionConfig,
    VisionKind,
    check_vision,
)
from engine.core.errors import ModelFormatError

KINDS: dict[str, VisionKind] = {
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
# The tensors of an image encoder have these prefixes in Hugging Face checkpoints, also after
# "model.". They are replaced by the names that `vision_tensors` uses.
PREFIXES = {
    "vision_tower.vision_model.": "vision.",
    "vision_tower.": "vision.",
    "vision_model.": "vision.",
    "connector.": "connector.",
    "multi_modal_projector.": "connector.",
}
# SigLIP's pooling head, which image input for text models does not use.
UNUSED_PREFIX = "vision.head."
_ACTIVATIONS = ("gelu_pytorch_tanh",)


def vision_from_hf(
    config: Mapping[str, Any], processor: Mapping[str, Any], output_size: int, vocab_size: int
) -> VisionConfig | None:
    """The image encoder that a config.json describes. `processor` is the content of
    preprocessor_config.json. None if there is no encoder, or if its kind is not supported. Then
    only the text model is used.
    """
    names = config.get("architectures") or ()
    kind = next((KINDS[name] for name in names if name in KINDS), None)
    if kind is None or not isinstance(config.get("vision_config"), Mapping):
        return None
    whole, vision = Reader(config, "config.json"), Reader(config["vision_config"], "vision_config")
    image_size, patch_size = vision.read(int, "image_size"), vision.read(int, "patch_size")
    activation = vision.read(str, "hidden_act", default=_ACTIVATIONS[0])
    if activation not in _ACTIVATIONS:
        raise ModelFormatError(f"vision_config: key 'hidden_act': {activation} is not supported")
    if vision.read(int, "num_channels", default=3) != 3:
        raise ModelFormatError("vision_config: key 'num_channels' must be 3")
    if kind == "gemma3":
        image_token_id = whole.read(int, "image_token_index", default=262_144)
        placeholder_id = whole.read(int, "boi_token_index", default=255_999)
        end_id: int | None = whole.read(int, "eoi_token_index", default=256_000)
        side = round(whole.read(int, "mm_tokens_per_image", default=256) ** 0.5)
        merge = max(1, image_size // max(1, patch_size) // max(1, side))
    else:
        image_token_id = placeholder_id = whole.read(int, "image_token_id")
        end_id = None
        merge = whole.read(int, "scale_factor", default=2)
    return check_vision(
        VisionConfig(
            kind=kind,
            image_token_id=image_token_id,
            placeholder_id=placeholder_id,
            end_id=end_id,
            image_size=image_size,
            patch_size=patch_size,
            hidden_size=vision.read(int, "hidden_size"),
            num_layers=vision.read(int, "num_hidden_layers"),
            num_heads=vision.read(int, "num_attention_heads"),
            intermediate_size=vision.read(int, "intermediate_size"),
            norm_eps=vision.read(float, "layer_norm_eps", default=1e-6),
            merge=merge,
            output_size=output_size,
            processing=_processing(kind, image_size, Reader(processor, "preprocessor_config.json")),
        ),
        vocab_size,
    )


def _processing(kind: VisionKind, image_size: int, reader: Reader) -> ImageProcessing:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if reader.read(bool, key, default=True) is not True:
            raise ModelFormatError(f"preprocessor_config.json: key '{key}' must be true")
    if reader.read(bool, "do_pan_and_scan", default=False):
        raise ModelFormatError(
            "preprocessor_config.json: key 'do_pan_and_scan': crops are not supported"
        )
    size: Mapping[str, Any] = reader.read(dict, "size", default={})
    longest, splits = 0, False
    if kind == "idefics3":
        tile: Mapping[str, Any] = reader.read(dict, "max_image_size", default={})
        if tile.get("longest_edge", image_size) != image_size:
            raise ModelFormatError(
                "preprocessor_config.json: key 'max_image_size' must equal the image size of the "
                f"encoder, which is {image_size}"
            )
        longest = Reader(size, "key 'size'").read(int, "longest_edge", default=4 * image_size)
        splits = reader.read(bool, "do_image_splitting", default=True)
    elif (size.get("height", image_size), size.get("width", image_size)) != (image_size,) * 2:
        raise ModelFormatError(
            "preprocessor_config.json: key 'size' must equal the image size of the encoder, which "
            f"is {image_size}"
        )
    return ImageProcessing(
        mean=_channels(reader, "image_mean"),
        std=_channels(reader, "image_std"),
        rescale=reader.read(float, "rescale_factor", default=1 / 255),
        resample=reader.read(int, "resample", default=1 if kind == "idefics3" else 2),
        longest_edge=longest,
        splits=splits,
    )


def _channels(reader: Reader, key: str) -> tuple[float, float, float]:
    values = reader.read(list, key, default=[0.5, 0.5, 0.5])
    if len(values) != 3 or not all(isinstance(each, int | float) for each in values):
        raise ModelFormatError(f"preprocessor_config.json: key '{key}' must have three numbers")
    red, green, blue = map(float, values)
    return red, green, blue


def vision_tensors(config: VisionConfig) -> tuple[TensorSpec, ...]:
    """The weights of an image encoder. Names in the Hugging Face format begin with "vision." or
    "connector." (see `PREFIXES`).
    """
    return tuple(_tensors(config))


def _tensors(config: VisionConfig) -> Iterator[TensorSpec]:
    size, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    embeddings = "vision.embeddings"
    yield TensorSpec(
        "patch.weight",
        (size, 3, patch, patch),
        f"{embeddings}.patch_embedding.weight",
        "v.patch_embd.weight",
    )
    yield TensorSpec(
        "patch.bias", (size,), f"{embeddings}.patch_embedding.bias", "v.patch_embd.bias"
    )
    yield TensorSpec(
        "position.weight",
        ((config.image_size // patch) ** 2, size),
        f"{embeddings}.position_embedding.weight",
        "v.position_embd.weight",
    )
    for layer in range(config.num_layers):
        hf, gguf = f"vision.encoder.layers.{layer}", f"v.blk.{layer}"
        rows = (
            ("attn_norm", (size,), "layer_norm1", "ln1"),
            ("attn.q", (size, size), "self_attn.q_proj", "attn_q"),
            ("attn.k", (size, size), "self_attn.k_proj", "attn_k"),
            ("attn.v", (size, size), "self_attn.v_proj", "attn_v"),
            ("attn.o", (size, size), "self_attn.out_proj", "attn_out"),
            ("mlp_norm", (size,), "layer_norm2", "ln2"),
            ("mlp.up", (inner, size), "mlp.fc1", "ffn_up"),
            ("mlp.down", (size, inner), "mlp.fc2", "ffn_down"),
        )
        for name, shape, theirs, short in rows:
            for part, dims in (("weight", shape), ("bias", shape[:1])):
                yield TensorSpec(
                    f"layers.{layer}.{name}.{part}",
                    dims,
                    f"{hf}.{theirs}.{part}",
                    f"{gguf}.{short}.{part}",
                )
    for part in ("weight", "bias"):
        yield TensorSpec(
            f"norm.{part}", (size,), f"vision.post_layernorm.{part}", f"v.post_ln.{part}"
        )
    yield from _connector(config)


def _connector(config: VisionConfig) -> Iterator[TensorSpec]:
    size, out = config.hidden_size, config.output_size
    if config.kind == "gemma3":
        yield TensorSpec(
            "connector_norm.weight",
            (size,),
            "connector.mm_soft_emb_norm.weight",
            "mm.soft_emb_norm.weight",
            Transform(added=1.0),
        )
        yield TensorSpec(
            "connector.weight",
            (out, size),
            "connector.mm_input_projection_weight",
            "mm.input_projection.weight",
            Transform(transposed=True),
            Transform(transposed=True),
        )
        return
    yield TensorSpec(
        "connector.weight",
        (out, size * config.merge**2),
        "connector.modality_projection.proj.weight",
        "mm.model.fc.weight",
    )
