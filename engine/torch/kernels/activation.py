"""The activations of MLPs. A gated activation is activation(gate) * up. Gate is the first half of
each input row, up is the second half.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.base import Example, Inputs, Shape, op, size_of

GATES = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
# The constants of "swiglu_oai", the gated activation of gpt-oss: gate and up are clamped, sigmoid's
# argument is multiplied, and 1 is added to up.
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


@op("epilogue:gated")
def gated(gate_up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up, for gate and up side by side: (T, 2 I) -> (T, I)

    `kind` is the activation, one of `GATES`.
    """
    return gated_halves(gate_up, kind)


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square()
    assert kind in ("gelu", "gelu_tanh"), kind
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated_halves(gate_up: Tensor, kind: str) -> Tensor:
    """As `gated`, in plain PyTorch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return activate(gate, kind) * up


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    for rows in shape.rows:
        for kind in GATES:
            gate_up = inputs.normal(rows, 2 * shape.inner_size, scale=4)
            yield Example(f"{kind} {rows}x{shape.inner_size}", (gate_up, kind))


gated.specify(_examples, lambda gate_up, kind: size_of(gate_up) * 3 // 2)
