"""Few rows times matrices of 4 and 8 bits, on a Hopper GPU: the CUDA kernel, and the Triton kernels
that it replaces.

    python -m benchmarks.gpu.grouped

First, products are compared with float32. Then they are timed. The exit status is 1 if an error is
too large.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.roof import H200
from benchmarks.gpu.timing import copies_of, microseconds
from engine.torch.kernels.base import LLAMA_8B, Inputs
from engine.torch.kernels.quantized import (
    GroupedWeight,
    dequantize,
    grouped_linear,
    random_weight,
    tiled,
)
from engine.torch.kernels.skinny import Fusion

LAYOUTS = {
    "GPTQ": (4, 128, False),
    "Q4_0": (4, 32, False),
    "Q4_K": (4, 32, True),
    "Q6_K": (8, 16, False),
}
TOKENS = (1, 2, 4, 8, 16)
MAX_ERROR = 5e-3  # of the norm of the result, which is rounded to bfloat16


class Product(NamedTuple):
    name: str
    outputs: int
    size: int
    norms: bool
    gate: str | None
    adds: bool

    def fusion(self, inputs: Inputs, tokens: int) -> Fusion:
        norm = inputs.normal(self.size) if self.norms else None
        residual = inputs.normal(tokens, self.outputs) if self.adds else None
        return Fusion(norm, 1e-5, self.gate, residual)


SHAPE = LLAMA_8B
PRODUCTS = (
    Product("qkv", SHAPE.qkv_size, SHAPE.hidden_size, True, None, False),
    Product("o", SHAPE.hidden_size, SHAPE.hidden_size, False, None, True),
    Product("gate_up", 2 * SHAPE.inner_size, SHAPE.hidden_size, True, "silu", False),
    Product("down", SHAPE.hidden_size, SHAPE.inner_size, False, None, True),
)


def cases() -> Iterator[tuple[str, GroupedWeight, Product, Inputs]]:
    for name, layout in LAYOUTS.items():
        for product in PRODUCTS:
            inputs = Inputs(torch.device("cuda"), torch.bfloat16)
            yield (
                name,
                random_weight(inputs, product.outputs, product.size, *layout),
                product,
                inputs,
            )


def multiply(
    x: Tensor, parts: tuple[Tensor | None, ...], layout: tuple[int, int, bool], fusion: Fusion
) -> Tensor:
    values, scales, minima = parts
    assert values is not None and scales is not None
    return grouped_linear(
        x, GroupedWeight(values, scales, minima, *layout[:2], layout[2]), None, fusion
    )


def exact(x: Tensor, weight: GroupedWeight, fusion: Fusion) -> Tensor:
    dense, y = dequantize.reference(weight, torch.float32), x.float()
    if fusion.norm is not None:
        y = (y * fusion.norm.float()).to(x.dtype) * torch.rsqrt(
            y.square().mean(1, keepdim=True) + fusion.eps
        )
    residual = None if fusion.residual is None else fusion.residual.float()
    return Fusion(None, 0.0, fusion.gate, residual).finished(y @ dense.T)


def check() -> bool:
    passed = True
    for name, weight, product, inputs in cases():
        matrix = tiled(weight)
        for tokens in TOKENS:
            x, fusion = inputs.normal(tokens, product.size), product.fusion(inputs, tokens)
            wanted = exact(x, weight, fusion)
            error = float((grouped_linear(x, matrix, None, fusion) - wanted).norm() / wanted.norm())
            if not error < MAX_ERROR:
                passed = False
                print(f"WRONG {name} {product.name} {tokens}: {error:.5f}")
    return passed


def measure(triton: bool) -> None:
    print(f"{'layout':8}{'matrix':10}" + "".join(f"{tokens:>8}    of roof" for tokens in TOKENS))
    for name, weight, product, inputs in cases():
        line = f"{name:8}{product.name:10}"
        for chosen in [weight, tiled(weight)] if triton else [tiled(weight)]:
            for tokens in TOKENS:
                x, fusion = inputs.normal(tokens, product.size), product.fusion(inputs, tokens)
                parts = (chosen.values, chosen.scales, chosen.minima)
                layout = (chosen.bits, chosen.group, chosen.is_tiled)
                took = microseconds(multiply, copies_of((x, parts, layout, fusion), {}))
                line += f"{took:8.1f} {weight.nbytes / H200.bytes_per_s * 1e6 / took:10.0%}"
            line += "\n" + " " * 18
        print(line.rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--triton", action="store_true", help="also measure matrices that are not tiled"
    )
    given = parser.parse_args()
    passed = check()
    measure(given.triton)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
