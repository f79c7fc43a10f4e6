"""The image encoder in PyTorch: a vision transformer and the connector to the text model.

The parameters have the names that `architectures/vision/files.py` defines.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.architectures.vision import VISION_THETA, VisionConfig
from engine.runtime.model_runner import F32
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import LayerNorm, RMSNorm
from engine.torch.layers.rotary import Rotation, rotate, rotation_of
from engine.torch.transfer import to_device, to_host


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the patches of an image are, and how attention is restricted."""

    rotation: Rotation | None  # RoPE by row and column; None: positions are added to the patches
    windows: tuple[int, ...]  # numbers of patches that attend to each other; empty: all do


class VisionAttention(nn.Module):
    """Self-attention in which every patch attends to all patches of the image, or of its window."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = Linear(size, 3 * size, True, (("q", size), ("k", size), ("v", size)))
        self.o = Linear(size, size, True)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # (P, N, H) each
        if layout.rotation is not None:
            q, k = rotate(q, layout.rotation), rotate(k, layout.rotation)
        heads = [each.transpose(0, 1) for each in (q, k, v)]  # (N, P, H) each
        if not layout.windows:
            out = F.scaled_dot_product_attention(*(each[None] for each in heads))[0]
        else:
            parts = zip(*(each.split(layout.windows, dim=1) for each in heads), strict=True)
            out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1)
        return self.o(out.transpose(0, 1).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate = Linear(size, inner, True) if config.kind == "qwen2_5_vl" else None
        self.up = Linear(size, inner, True)
        self.down = Linear(inner, size, True)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def _norm(config: VisionConfig) -> nn.Module:
    kind = RMSNorm if config.kind == "qwen2_5_vl" else LayerNorm
    return kind(config.hidden_size, config.norm_eps)


class VisionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.attn_norm = _norm(config)
        self.attn = VisionAttention(config)
        self.mlp_norm = _norm(config)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + self.attn(self.attn_norm(x), layout)  # (P, D)
        return x + self.mlp(self.mlp_norm(x))  # (P, D)


class Patches(nn.Module):
    """The embedding of patches: a convolution whose stride is the size of its kernel. If a patch
    consists of several copies, the sum of their kernels is used.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        copies = (config.frames_per_patch,) if config.kind == "qwen2_5_vl" else ()
        self.weight = nn.Parameter(torch.empty(size, 3, *copies, patch, patch))
        self.bias = None if copies else nn.Parameter(torch.empty(size))

    def forward(self, image: Tensor) -> Tensor:
        """Image (3, height, width) -> patches (rows, columns, D)"""
        kernel = self.weight.sum(2) if self.weight.dim() == 5 else self.weight
        patches = F.conv2d(image[None], kernel, self.bias, stride=kernel.shape[-1])
        return patches[0].permute(1, 2, 0)


class Vision(nn.Module):
    """An image encoder. `forward` gets the pixels of an image, (height, width, 3) uint8, and
    returns the embeddings (E, D) of the image's tokens.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = Patches(config)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))

    def _patches(self, pixels: Tensor) -> Tensor:
        """The embeddings of the image's patches, (rows, columns, D)."""
        processing = self.config.processing
        mean = pixels.new_tensor(processing.mean, dtype=torch.float32)
        std = pixels.new_tensor(processing.std, dtype=torch.float32)
        scaled = (pixels.to(torch.float32) * processing.rescale - mean) / std
        return self.patch(scaled.permute(2, 0, 1).to(self.patch.weight.dtype))


class Siglip(Vision):
    """SigLIP with learned positions, and the connectors of Idefics3 and Gemma 3."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.position = nn.Embedding((config.image_size // config.patch_size) ** 2, size)
        self.norm = LayerNorm(size, config.norm_eps)
        pools = config.kind == "gemma3"
        self.connector_norm = RMSNorm(size, config.norm_eps) if pools else None
        self.connector = Linear(size if pools else size * config.merge**2, config.output_size)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self._patches(pixels).flatten(0, 1) + self.position.weight
        for block in self.layers:
            x = block(x, Layout(None, ()))
        return self._connected(self.norm(x))

    def _connected(self, x: Tensor) -> Tensor:
        """Makes one embedding of each square of merge * merge patches."""
        merge, side = self.config.merge, self.config.tokens_per_side
        squares = x.view(side, merge, side, merge, -1).transpose(1, 2)  # (side, side, m, m, D)
        if self.connector_norm is None:
            return self.connector(squares.reshape(side * side, -1))
        return self.connector(self.connector_norm(squares.mean((2, 3)).flatten(0, 1)))


class Connector(nn.Module):
    """The MLP that makes one embedding of the patches of a square."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        wide = config.hidden_size * config.merge**2
        self.up = Linear(wide, wide, True)
        self.down = Linear(wide, config.output_size, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class QwenVision(Vision):
    """The encoder of Qwen2.5-VL. Images have any size. RoPE rotates by the row and the column of a
    patch, and most layers attend within square windows.

    Patches are ordered by window, and in a window by the square that becomes one embedding.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.connector_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.connector = Connector(config)
        head_dim = config.hidden_size // config.num_heads
        steps = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._frequencies = VISION_THETA**-steps  # (H / 4,)

    def forward(self, pixels: Tensor) -> Tensor:
        merge = self.config.merge
        patches = self._patches(pixels)
        rows, columns = patches.shape[0] // merge, patches.shape[1] // merge  # of squares
        order, windows = self._windows(rows, columns)
        order = order.to(pixels.device)
        x = self._squares(patches)[order].flatten(0, 1)
        layout = Layout(self._rotation(rows, columns, order, x), windows)
        for index, block in enumerate(self.layers):
            full = index in self.config.full_layers
            x = block(x, Layout(layout.rotation, ()) if full else layout)
        merged = self.connector(self.connector_norm(x).view(len(order), -1))
        return merged[order.argsort()]

    def _squares(self, patches: Tensor) -> Tensor:
        """(rows, columns, ...) -> (squares, merge * merge, ...)"""
        merge = self.config.merge
        rows, columns = patches.shape[0] // merge, patches.shape[1] // merge
        squares = patches.unflatten(0, (rows, merge)).unflatten(2, (columns, merge))
        return squares.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, tuple[int, ...]]:
        """The squares in the order of their windows, and the number of patches in each window."""
        side = self.config.window_size // self.config.image_size
        row, column = torch.arange(rows)[:, None], torch.arange(columns)
        window = (row // side) * (-(-columns // side)) + column // side
        order = window.flatten().argsort(stable=True)
        sizes = window.flatten().bincount() * self.config.merge**2
        return order, tuple(int(each) for each in sizes.numpy())

    def _rotation(self, rows: int, columns: int, order: Tensor, x: Tensor) -> Rotation:
        merge = self.config.merge
        row, column = torch.meshgrid(
            torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij"
        )
        places = self._squares(torch.stack((row, column), dim=-1)).to(x.device)  # (squares, m m, 2)
        places = places[order].flatten(0, 1)  # (P, 2)
        angles = (places[..., None] * self._frequencies.to(x.device)).flatten(1)  # (P, H / 2)
        return rotation_of(angles.cos(), angles.sin(), x.dtype)


def vision_model(config: VisionConfig) -> Siglip | QwenVision:
    return QwenVision(config) if config.kind == "qwen2_5_vl" else Siglip(config)


class TorchImageEncoder:
    """Encodes the images of requests."""

    def __init__(self, model: Siglip | QwenVision, device: torch.device) -> None:
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
