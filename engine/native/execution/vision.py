"""The image encoder of the native framework: SigLIP and the connectors of Idefics3 and Gemma 3.

It is computed by numpy in float32. Its matrix products run in numpy's BLAS library, on the threads
that this library chooses.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.vision import VisionConfig
from engine.runtime.model_runner import F32


class Stored(Protocol):
    def numpy(self) -> F32: ...


class NativeImageEncoder:
    """Encodes the images of requests."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, Stored]) -> None:
        self._config = config
        self._weights = {name: weight.numpy() for name, weight in weights.items()}

    def encode(self, pixels: NDArray[np.uint8]) -> F32:
        """Pixels (height, width, 3) -> embeddings (E, D)"""
        x = self._patches(pixels) + self._weights["position.weight"]  # (P, D)
        for layer in range(self._config.num_layers):
            name = f"layers.{layer}"
            x = x + self._attention(self._layer_norm(x, f"{name}.attn_norm"), f"{name}.attn")
            inner = self._linear(self._layer_norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up")
            x = x + self._linear(_gelu(inner), f"{name}.mlp.down")
        return self._connected(self._layer_norm(x, "norm"))

    def _patches(self, pixels: NDArray[np.uint8]) -> F32:
        """The embeddings of the patches, row by row."""
        processing, patch = self._config.processing, self._config.patch_size
        mean, std = np.array(processing.mean, np.float32), np.array(processing.std, np.float32)
        scaled: F32 = (pixels.astype(np.float32) * np.float32(processing.rescale) - mean) / std
        side = self._config.image_size // patch
        kept = scaled[: side * patch, : side * patch]
        squares = kept.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        kernel = self._weights["patch.weight"]  # (D, 3, patch, patch)
        flat = squares.reshape(side * side, -1)
        embedded: F32 = flat @ kernel.reshape(len(kernel), -1).T + self._weights["patch.bias"]
        return embedded

    def _attention(self, x: F32, name: str) -> F32:
        """Every patch attends to all patches. Heads are computed one after the other, because the
        scores of all heads could take gigabytes.
        """
        num_heads = self._config.num_heads
        size = x.shape[1] // num_heads
        q, k, v = (self._linear(x, f"{name}.{part}") for part in "qkv")
        out = np.empty_like(x)
        for head in range(num_heads):
            columns = slice(head * size, (head + 1) * size)
            scores = (q[:, columns] * np.float32(size**-0.5)) @ k[:, columns].T  # (P, P)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            out[:, columns] = scores @ v[:, columns]
        return self._linear(out, f"{name}.o")

    def _connected(self, x: F32) -> F32:
        """Makes one embedding of each square of merge * merge patches."""
        merge, side = self._config.merge, self._config.tokens_per_side
        squares = x.reshape(side, merge, side, merge, -1).transpose(0, 2, 1, 3, 4)
        squares = squares.reshape(side * side, merge * merge, -1)  # (E, m m, D)
        if self._config.kind == "gemma3":
            pooled = squares.mean(axis=1)
            power = np.square(pooled).mean(axis=-1, keepdims=True)
            normed = pooled / np.sqrt(power + np.float32(self._config.norm_eps))
            merged = normed * self._weights["connector_norm.weight"]
        else:
            merged = squares.reshape(side * side, -1)
        embeds: F32 = merged @ self._weights["connector.weight"].T
        return embeds

    def _linear(self, x: F32, name: str) -> F32:
        y: F32 = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return y

    def _layer_norm(self, x: F32, name: str) -> F32:
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centered).mean(axis=-1, keepdims=True)
        scaled = centered / np.sqrt(variance + np.float32(self._config.norm_eps))
        normed: F32 = scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return normed


def _gelu(x: F32) -> F32:
    """GELU by its approximation with tanh."""
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
    y: F32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y
