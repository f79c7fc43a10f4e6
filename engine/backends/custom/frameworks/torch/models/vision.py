"""The image encoder in PyTorch: a vision transformer and the connector to the text model.

The parameters have the names that `architectures/vision_files.py` defines.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.backends.custom.architectures.vision import VisionConfig
from engine.backends.custom.frameworks.torch.execution.transfer import to_device, to_host
from engine.backends.custom.frameworks.torch.layers.linear import Linear
from engine.backends.custom.frameworks.torch.layers.norm import LayerNorm, RMSNorm
from engine.backends.custom.runtime.model_runner import F32


class VisionAttention(nn.Module):
    """Self-attention in which every patch attends to all patches of the image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = Linear(size, 3 * size, True, (("q", size), ("k", size), ("v", size)))
        self.o = Linear(size, size, True)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (P, 3, N, H)
        q, k, v = heads.permute(1, 2, 0, 3)[:, None]  # (1, N, P, H) each
        out = F.scaled_dot_product_attention(q, k, v)[0]
        return self.o(out.transpose(0, 1).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.intermediate_size, True)
        self.down = Linear(config.intermediate_size, config.hidden_size, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = VisionAttention(config)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))  # (P, D)
        return x + self.mlp(self.mlp_norm(x))  # (P, D)


class Patches(nn.Module):
    """The embedding of patches: a convolution whose stride is the size of its kernel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        self.weight = nn.Parameter(torch.empty(size, 3, patch, patch))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, image: Tensor) -> Tensor:
        """Image (3, height, width) -> patches (P, D), row by row"""
        patch = self.weight.shape[-1]
        return F.conv2d(image[None], self.weight, self.bias, stride=patch)[0].flatten(1).t()


class Vision(nn.Module):
    """The image encoder."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patch = Patches(config)
        self.position = nn.Embedding((config.image_size // config.patch_size) ** 2, size)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.norm = LayerNorm(size, config.norm_eps)
        pools = config.kind == "gemma3"
        self.connector_norm = RMSNorm(size, config.norm_eps) if pools else None
        self.connector = Linear(size if pools else size * config.merge**2, config.output_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (height, width, 3), uint8 -> embeddings (E, D) of the image tokens"""
        x = self.patch(self._normalized(pixels)) + self.position.weight
        for block in self.layers:
            x = block(x)
        return self._connected(self.norm(x))

    def _normalized(self, pixels: Tensor) -> Tensor:
        processing = self.config.processing
        mean, std = (
            pixels.new_tensor(each, dtype=torch.float32)
            for each in (processing.mean, processing.std)
        )
        scaled = (pixels.to(torch.float32) * processing.rescale - mean) / std
        return scaled.permute(2, 0, 1).to(self.patch.weight.dtype)

    def _connected(self, x: Tensor) -> Tensor:
        """Makes one embedding of each square of merge * merge patches."""
        merge, side = self.config.merge, self.config.tokens_per_side
        squares = x.view(side, merge, side, merge, -1).transpose(1, 2)  # (E / side, side, m, m, D)
        if self.connector_norm is None:
            return self.connector(squares.reshape(side * side, -1))
        return self.connector(self.connector_norm(squares.mean((2, 3)).flatten(0, 1)))


class TorchImageEncoder:
    """Encodes the images of requests."""

    def __init__(self, model: Vision, device: torch.device) -> None:
        self._model = model
        self._device = device

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.uint8]) -> F32:
        """Pixels (height, width, 3) -> embeddings (E, D)"""
        embeds = to_host(self._model(to_device(pixels, self._device)).float())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        on_host: F32 = embeds.numpy()
        return on_host
