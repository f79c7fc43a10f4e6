"""Reads the settings of an image encoder from the files of a model, and lists its weights.

Checkpoints in the Hugging Face format store the encoder beside the text model. GGUF models store it
in a file of its own, which is called "mmproj".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.architectures.base import Reader
from engine.architectures.tensors import TensorSpec, Transform
from engine.architectures.vision import (
    VISION_THETA,
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
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}
# The tensors of an image encoder have these prefixes in Hugging Face checkpoints, also after
# "model.". They are replaced by the names that `vision_tensors` uses.
PREFIXES = {
    "vision_tower.vision_model.": "vision.",
    "vision_tower.": "vision.",
    "vision_model.": "vision.",
    "visual.": "vision.",
    "connector.": "connector.",
    "multi_modal_projector.": "connector.",
}
# SigLIP's pooling head, which image input for text models does not use.
UNUSED_PREFIX = "vision.head."
_ACTIVATIONS: dict[VisionKind, str] = {
    "idefics3": "gelu_pytorch_tanh",
    "gemma3": "gelu_pytorch_tanh",
    "qwen2_5_vl": "silu",
}
# The architecture of the text model that belongs to each projector in a GGUF file.
MMPROJ_FAMILIES = {"idefics3": "llama", "gemma3": "gemma3"}
# GGUF files of Gemma 3 may lack the token of an image. Then another token stands for it, which
# occurs in no prompt.
_IMAGE_TOKENS = ("<image_soft_token>", "<pad>")
_MMPROJ_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
}
_SIGLIP_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# The values of these keys in Transformers. Published files omit some keys that have these values.
_SIGLIP_DEFAULTS: dict[VisionKind, tuple[int, ...]] = {
    "idefics3": (224, 32, 1152, 3072, 12, 16),
    "gemma3": (224, 16, 768, 3072, 12, 12),
}
# Mean and standard deviation of each channel, if the file has none.
_NORMAL = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# Our name of a layer, the shape of its weight, and the layer's names in both formats.
_Row = tuple[str, tuple[int, ...], str, str]


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
    vision = Reader(config["vision_config"], "vision_config")
    activation = vision.read(str, "hidden_act", default=_ACTIVATIONS[kind])
    if activation != _ACTIVATIONS[kind]:
        raise ModelFormatError(f"vision_config: key 'hidden_act': {activation} is not supported")
    for key in ("num_channels", "in_channels", "in_chans"):
        if vision.read(int, key, default=3) != 3:
            raise ModelFormatError(f"vision_config: key '{key}' must be 3")
    read = _qwen_from_hf if kind == "qwen2_5_vl" else _siglip_from_hf
    found = read(kind, Reader(config, "config.json"), vision)
    made = VisionConfig(
        kind=kind,
        output_size=output_size,
        processing=_processing(
            kind, found["image_size"], Reader(processor, "preprocessor_config.json")
        ),
        **found,
    )
    return check_vision(made, vocab_size)


def _siglip_from_hf(kind: VisionKind, whole: Reader, vision: Reader) -> dict[str, Any]:
    """Settings of Idefics3 and of Gemma 3, whose encoders are SigLIP."""
    usual = _SIGLIP_DEFAULTS[kind]
    found: dict[str, Any] = {
        ours: vision.read(int, key, default=default)
        for (key, ours), default in zip(_SIGLIP_KEYS.items(), usual, strict=True)
    }
    found["norm_eps"] = vision.read(float, "layer_norm_eps", default=1e-6)
    image_size, patch_size = found["image_size"], found["patch_size"]
    if kind == "idefics3":
        image_token = whole.read(int, "image_token_id")
        tokens = {"image_token_id": image_token, "placeholder_id": image_token, "end_id": None}
        return {**found, **tokens, "merge": whole.read(int, "scale_factor", default=2)}
    side = round(whole.read(int, "mm_tokens_per_image", default=256) ** 0.5)
    return {
        **found,
        "image_token_id": whole.read(int, "image_token_index", default=262_144),
        "placeholder_id": whole.read(int, "boi_token_index", default=255_999),
        "end_id": whole.read(int, "eoi_token_index", default=256_000),
        "merge": max(1, image_size // max(1, patch_size) // max(1, side)),
    }


def _qwen_from_hf(kind: VisionKind, whole: Reader, vision: Reader) -> dict[str, Any]:
    rope: Mapping[str, Any] = vision.read(dict, "rope_parameters", default={})
    if rope.get("rope_theta", VISION_THETA) != VISION_THETA:
        raise ModelFormatError(f"vision_config: key 'rope_theta' must be {VISION_THETA}")
    layers: list[Any] = vision.read(list, "fullatt_block_indexes", default=[7, 15, 23, 31])
    if not all(type(each) is int for each in layers):
        raise ModelFormatError("vision_config: key 'fullatt_block_indexes' must have ints")
    merge, patch_size = vision.read(int, "spatial_merge_size"), vision.read(int, "patch_size")
    image_token = whole.read(int, "image_token_id")
    return {
        "image_token_id": image_token,
        "placeholder_id": image_token,
        "end_id": None,
        "image_size": merge * patch_size,
        "patch_size": patch_size,
        "num_layers": vision.read(int, "depth"),
        "num_heads": vision.read(int, "num_heads"),
        "hidden_size": vision.read(int, "hidden_size"),
        "intermediate_size": vision.read(int, "intermediate_size"),
        "norm_eps": 1e-6,
        "merge": merge,
        "window_size": vision.read(int, "window_size"),
        "full_layers": tuple(layers),
        "frames_per_patch": vision.read(int, "temporal_patch_size", default=2),
    }


def vision_from_mmproj(
    metadata: Mapping[str, Any], tokens: Sequence[str], output_size: int
) -> VisionConfig:
    """The image encoder that a GGUF file with the architecture "clip" describes. `tokens` is the
    vocabulary of the text model.
    """
    where = "GGUF metadata"
    reader = Reader(metadata, where)
    projector = reader.read(str, "clip.projector_type")
    if projector not in MMPROJ_FAMILIES:
        raise ModelFormatError(f"{where}: projector '{projector}' is not supported")
    kind: VisionKind = "gemma3" if projector == "gemma3" else "idefics3"
    found: dict[str, Any] = {
        ours: reader.read(int, f"clip.vision.{key}") for key, ours in _MMPROJ_KEYS.items()
    }
    merge = reader.read(
        int, "clip.vision.projector.scale_factor", default=4 if kind == "gemma3" else 2
    )
    mean = _channels(reader, "clip.vision.image_mean", _NORMAL)
    std = _channels(reader, "clip.vision.image_std", _NORMAL)
    if kind == "gemma3":
        names = (_IMAGE_TOKENS, ("<start_of_image>",), ("<end_of_image>",))
        image, begin, end = (_token(tokens, each) for each in names)
        ids: dict[str, Any] = {"image_token_id": image, "placeholder_id": begin, "end_id": end}
        processing = ImageProcessing(mean, std, resample=2)
    else:
        image = _token(tokens, ("<image>",))
        ids = {"image_token_id": image, "placeholder_id": image, "end_id": None}
        edge = reader.read(int, "clip.vision.preproc_image_size", default=4 * found["image_size"])
        processing = ImageProcessing(mean, std, resample=1, longest_edge=edge, splits=True)
    made = VisionConfig(
        kind=kind,
        norm_eps=reader.read(float, "clip.vision.attention.layer_norm_epsilon", default=1e-6),
        merge=merge,
        output_size=output_size,
        processing=processing,
        **found,
        **ids,
    )
    return check_vision(made, len(tokens))


def _token(tokens: Sequence[str], names: Iterable[str]) -> int:
    found = next((name for name in names if name in tokens), None)
    if found is None:
        raise ModelFormatError(f"the tokenizer lacks the token {next(iter(names))}")
    return tokens.index(found)


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
    elif kind == "qwen2_5_vl":
        return _qwen_processing(reader, Reader(size, "key 'size'"))
    elif (size.get("height", image_size), size.get("width", image_size)) != (image_size,) * 2:
        raise ModelFormatError(
            "preprocessor_config.json: key 'size' must equal the image size of the encoder, which "
            f"is {image_size}"
        )
    return ImageProcessing(
        mean=_channels(reader, "image_mean", _NORMAL),
        std=_channels(reader, "image_std", _NORMAL),
        rescale=reader.read(float, "rescale_factor", default=1 / 255),
        resample=reader.read(int, "resample", default=1 if kind == "idefics3" else 2),
        longest_edge=longest,
        splits=splits,
    )


def _qwen_processing(reader: Reader, size: Reader) -> ImageProcessing:
    """Older files have `min_pixels` and `max_pixels`, and newer ones call them edges."""
    least = size.read(int, "shortest_edge", default=56 * 56)
    most = size.read(int, "longest_edge", default=28 * 28 * 1280)
    return ImageProcessing(
        mean=_channels(reader, "image_mean", _CLIP_MEAN),
        std=_channels(reader, "image_std", _CLIP_STD),
        rescale=reader.read(float, "rescale_factor", default=1 / 255),
        resample=reader.read(int, "resample", default=3),
        min_pixels=reader.read(int, "min_pixels", default=least),
        max_pixels=reader.read(int, "max_pixels", default=most),
    )


def _channels(
    reader: Reader, key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    values = reader.read(list, key, default=list(default))
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
    if config.kind == "qwen2_5_vl":
        yield from _qwen_tensors(config)
        return
    size, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    places = (config.image_size // patch) ** 2
    embeddings = "vision.embeddings"
    whole: tuple[_Row, ...] = (
        ("patch", (size, 3, patch, patch), f"{embeddings}.patch_embedding", "v.patch_embd"),
        ("norm", (size,), "vision.post_layernorm", "v.post_ln"),
    )
    yield from _pairs(whole)
    yield TensorSpec(
        "position.weight",
        (places, size),
        f"{embeddings}.position_embedding.weight",
        "v.position_embd.weight",
    )
    for layer in range(config.num_layers):
        hf, gguf = f"vision.encoder.layers.{layer}", f"v.blk.{layer}"
        rows: tuple[_Row, ...] = (
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
            row = (f"layers.{layer}.{name}", shape, f"{hf}.{theirs}", f"{gguf}.{short}")
            yield from _pairs((row,))
    yield from _connector(config)


def _pairs(rows: Iterable[_Row]) -> Iterator[TensorSpec]:
    """A weight and a bias for each row."""
    for name, shape, hf, gguf in rows:
        for part, dims in (("weight", shape), ("bias", shape[:1])):
            yield TensorSpec(f"{name}.{part}", dims, f"{hf}.{part}", f"{gguf}.{part}")


def _qwen_tensors(config: VisionConfig) -> Iterator[TensorSpec]:
    size, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    yield TensorSpec(
        "patch.weight",
        (size, 3, config.frames_per_patch, patch, patch),
        "vision.patch_embed.proj.weight",
        None,
    )
    for layer in range(config.num_layers):
        ours, hf, gguf = f"layers.{layer}", f"vision.blocks.{layer}", f"v.blk.{layer}"
        for name, theirs, short in (("attn_norm", "norm1", "ln1"), ("mlp_norm", "norm2", "ln2")):
            names = (f"{hf}.{theirs}.weight", f"{gguf}.{short}.weight")
            yield TensorSpec(f"{ours}.{name}.weight", (size,), *names)
        for index, part in enumerate("qkv"):
            stored = Transform(before=index * size, after=(2 - index) * size)
            for kind, shape in (("weight", (size, size)), ("bias", (size,))):
                yield TensorSpec(
                    f"{ours}.attn.{part}.{kind}",
                    shape,
                    f"{hf}.attn.qkv.{kind}",
                    f"{gguf}.attn_{part}.{kind}",
                    stored,
                )
        rows: tuple[_Row, ...] = (
            ("attn.o", (size, size), "attn.proj", "attn_out"),
            ("mlp.gate", (inner, size), "mlp.gate_proj", "ffn_gate"),
            ("mlp.up", (inner, size), "mlp.up_proj", "ffn_up"),
            ("mlp.down", (size, inner), "mlp.down_proj", "ffn_down"),
        )
        for name, dims, theirs, short in rows:
            yield from _pairs(((f"{ours}.{name}", dims, f"{hf}.{theirs}", f"{gguf}.{short}"),))
    wide = size * config.merge**2
    yield TensorSpec(
        "connector_norm.weight", (size,), "vision.merger.ln_q.weight", "v.post_ln.weight"
    )
    yield from _pairs(
        (
            ("connector.up", (wide, wide), "vision.merger.mlp.0", "mm.0"),
            ("connector.down", (config.output_size, wide), "vision.merger.mlp.2", "mm.2"),
        )
    )


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
