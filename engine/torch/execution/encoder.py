"""The text encoder in PyTorch. It computes one vector per text from the text's token ids.

Texts are sorted by length and computed in groups. The tokens of a group are concatenated, so
matmuls compute no padding. Only attention pads all texts to the longest of the group and masks the
padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.torch.layers.attention import Attention
from engine.torch.layers.rotary import Rotary, Rotation
from engine.torch.models.encoder import TextEncoder
from engine.torch.transfer import to_device, to_host
from engine.worker.encoder_loop import EncoderSpec, Prompt, finished

# Max tokens per group. Every text counts as long as the longest text of the group, because
# attention pads it to that length.
GROUP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class TextsStep:
    """A forward pass over a group of texts. Tokens attend only to tokens of their own text."""

    lengths: Tensor  # (S,) int64
    positions: Tensor  # (T,) int64
    padded: Tensor  # (T,) int64: the token's index after all texts are padded to the longest
    visible: Tensor  # (S, 1, 1, L) bool: whether a position of a padded text has a token
    rotations: tuple[Rotation | None, ...]  # by layer

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        q, k, v = attention.heads(qkv, self.rotations[attention.layer])
        visible = self.visible
        if attention.window is not None:
            places = torch.arange(visible.shape[-1], device=visible.device)
            visible = visible & ((places[:, None] - places).abs() < attention.window)
        out = F.scaled_dot_product_attention(
            self._pad(q), self._pad(k), self._pad(v), attn_mask=visible, scale=attention.scale
        )  # (S, N, L, H)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.padded)

    def _pad(self, x: Tensor) -> Tensor:
        """Pads all texts to the longest: (T, N, H) -> (S, N, L, H)"""
        num_texts, longest = self.visible.shape[0], self.visible.shape[-1]
        places = x.new_zeros(num_texts * longest, *x.shape[1:]).index_copy_(0, self.padded, x)
        return places.unflatten(0, (num_texts, longest)).transpose(1, 2)


class TorchEncoder:
    def __init__(self, model: TextEncoder, device: torch.device) -> None:
        config = model.config
        assert config.encoder is not None, config
        self._model = model
        self._config = config
        self._encoder = config.encoder
        self._device = device
        self._spec = EncoderSpec.of(config)
        self._rotaries = {
            rope: Rotary(rope, config.encoder.max_tokens, device, None) for rope in config.ropes
        }

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    @torch.inference_mode()
    def encode(
        self, prompts: Sequence[Prompt], starts: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        vectors = np.empty((len(prompts), self._spec.num_dimensions), np.float32)
        for rows in groups([len(prompt) for prompt in prompts], GROUP_TOKENS):
            begins = None if starts is None else np.array([starts[row] for row in rows])
            vectors[rows] = self._wait(self._vectors([prompts[row] for row in rows], begins))
        return finished(vectors, self._encoder)

    def close(self) -> None:
        """Frees the model. The encoder cannot be used afterwards."""
        del self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _vectors(self, prompts: Sequence[Prompt], begins: NDArray[np.int64] | None) -> Tensor:
        token_ids = np.fromiter((token for prompt in prompts for token in prompt), np.int64)
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        step = self._step(lengths)
        types = torch.zeros_like(step.positions)
        if begins is not None and self._encoder.num_token_types > 1:
            begin = self._put(np.repeat(begins, lengths))
            types = ((begin > 0) & (step.positions >= begin)).to(types.dtype)
        states = self._model(self._put(token_ids), types, step)  # (T, D)
        score = self._model.score
        pooled = self._pool(states.to(torch.float32), step)  # (S, D)
        return pooled if score is None else score(pooled.to(states.dtype)).to(torch.float32)

    def _step(self, lengths: NDArray[np.int64]) -> TextsStep:
        places = np.arange(lengths.max())
        visible = places < lengths[:, None]  # (S, L)
        positions = self._put(np.broadcast_to(places, visible.shape)[visible])  # (T,)
        dtype = self._model.embed.weight.dtype
        rotations = {
            rope: rotary.rotation(positions, dtype) for rope, rotary in self._rotaries.items()
        }
        ropes = (self._config.layer(index).rope for index in range(self._config.num_layers))
        return TextsStep(
            lengths=self._put(lengths),
            positions=positions,
            padded=self._put(np.flatnonzero(visible)),
            visible=self._put(visible)[:, None, None, :],
            rotations=tuple(None if rope is None else rotations[rope] for rope in ropes),
        )

    def _pool(self, states: Tensor, step: TextsStep) -> Tensor:
        lasts = step.lengths.cumsum(0) - 1  # index of each text's last token
        if self._encoder.pooling == "last":
            return states.index_select(0, lasts)
        if self._encoder.pooling == "cls":
            return states.index_select(0, lasts - step.lengths + 1)
        num_texts, longest = step.visible.shape[0], step.visible.shape[-1]
        sums = states.new_zeros(num_texts, states.shape[-1])
        sums.index_add_(0, step.padded.div(longest, rounding_mode="floor"), states)
        return sums / step.lengths[:, None]

    def _wait(self, vectors: Tensor) -> NDArray[np.float32]:
        on_host = to_host(vectors)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return on_host.numpy()

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def groups(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields the indices of texts in groups of similar length. In a group, the number of texts
    times the length of the longest text is at most `max_tokens`. A text that is longer than
    `max_tokens` forms a group of its own.
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[row] > max_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
