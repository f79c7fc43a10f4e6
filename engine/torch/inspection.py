"""Layer outputs and layer times of a PyTorch model, for `tools/inspection.py`. Both come
from a forward pass over one whole sequence, without a KV cache.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.tools.inspection import timed
from engine.torch.layers.norm import LayerNorm, RMSNorm
from engine.torch.models.base import Decoder
from engine.torch.models.blocks import Block, HalfBlock
from engine.torch.models.loading import build_model
from engine.weights.model import ModelSource

CPU = torch.device("cpu")


@torch.inference_mode()
def layer_outputs(source: ModelSource, token_ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    model, ids = _load(source, len(token_ids)), torch.tensor(token_ids)
    step = model.sequence_step(ids)
    x = model.embed_tokens(ids, step)
    found = {"embed": x}
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block | HalfBlock)
        attended, fed, x = block.halves(x, step)
        found |= {
            f"layers.{index}.attn": attended,
            f"layers.{index}.mlp": fed,
            f"layers.{index}.out": x,
        }
    found["logits"] = model.logits(x)
    return {site: values.numpy() for site, values in found.items()}


@torch.inference_mode()
def layer_times(source: ModelSource, num_tokens: int, repeats: int) -> dict[str, float]:
    model = _load(source, num_tokens)
    ids = torch.arange(num_tokens) % source.config.vocab_size
    step = model.sequence_step(ids)
    x = model.embed_tokens(ids, step)
    block, last = model.layers[0], x[-1:]
    assert isinstance(block, Block)
    calls: dict[str, Callable[[], Tensor]] = {
        "embed": lambda: model.embed_tokens(ids, step),
        "attn": lambda: block.mix(x, step),
        "mlp": lambda: block.feed(x),
        "norm": lambda: model.norm(last),
        "head": lambda: model.head(last),
    }
    for name, norm in block.named_children():
        if isinstance(norm, RMSNorm | LayerNorm):
            calls[name] = partial(norm, x)
    return dict(zip(calls, timed(list(calls.values()), repeats), strict=True))


def _load(source: ModelSource, num_tokens: int) -> Decoder:
    return build_model(source.config, source.weights, num_tokens, CPU, torch.float32)
