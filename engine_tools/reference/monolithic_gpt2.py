"""GPT-2 in plain numpy, one whole sequence at a time: the reference for all other implementations.

There is no KV cache and no batching. Weights have the names of a Hugging Face checkpoint, and each
function is one formula. Arithmetic is float64 by default, so that the rounding error in a
comparison comes from the other implementation.

    python engine_tools/reference/monolithic_gpt2.py MODEL_DIR 464 2068 7586
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias


def gelu(x: Array) -> Array:
    """GELU in the tanh approximation, with which GPT-2 was trained."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention; q, k and v are (N, T, H)."""
    num_tokens, head_dim = q.shape[1:]
    scores = q @ k.swapaxes(1, 2) / math.sqrt(head_dim)  # (N, T, T)
    hidden = np.triu(np.ones((num_tokens, num_tokens), bool), k=1)
    return softmax(np.where(hidden, -np.inf, scores)) @ v


def layer_outputs(
    weights: Mapping[str, Array],
    token_ids: Sequence[int],
    num_heads: int,
    eps: float = 1e-5,
    dtype: Any = np.float64,
) -> dict[str, Array]:
    """The output of each layer: embed, layers.{i}.attn, .mlp and .out, norm, logits."""
    # In checkpoints of a GPT2Model without a head, the names lack the prefix "transformer.".
    w = {name.removeprefix("transformer."): value.astype(dtype) for name, value in weights.items()}
    ids = np.asarray(token_ids)
    num_tokens = len(ids)

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]  # stored as (in, out)

    def norm(x: Array, name: str) -> Array:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def heads(x: Array) -> Array:
        return x.reshape(num_tokens, num_heads, -1).swapaxes(0, 1)  # (N, T, H)

    x = w["wte.weight"][ids] + w["wpe.weight"][:num_tokens]
    found = {"embed": x}
    num_layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    for layer in range(num_layers):
        name = f"h.{layer}"
        q, k, v = np.split(linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn"), 3, axis=1)
        mixed = attention(heads(q), heads(k), heads(v)).swapaxes(0, 1).reshape(num_tokens, -1)
        attended = linear(mixed, f"{name}.attn.c_proj")
        x = x + attended
        inner = gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"))
        fed = linear(inner, f"{name}.mlp.c_proj")
        x = x + fed
        found |= {
            f"layers.{layer}.attn": attended,
            f"layers.{layer}.mlp": fed,
            f"layers.{layer}.out": x,
        }
    x = norm(x, "ln_f")
    head = w.get("lm_head.weight", w["wte.weight"])
    return found | {"norm": x, "logits": x @ head.T}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The next tokens that GPT-2 finds most likely.")
    parser.add_argument("model", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("ids", type=int, nargs="+", help="token ids")
    given = parser.parse_args(arguments)

    from safetensors.numpy import load_file

    config = json.loads((given.model / "config.json").read_text())
    weights = load_file(given.model / "model.safetensors")
    found = layer_outputs(weights, given.ids, config["n_head"], config["layer_norm_epsilon"])
    chances = softmax(found["logits"][-1])
    for token in np.argsort(-chances)[:5]:
        print(f"{token:6}  {chances[token]:.4f}")


if __name__ == "__main__":
    main()
