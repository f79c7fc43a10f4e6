"""Quantized matrices whose blocks are contiguous in memory, and the CUDA kernel that multiplies few
rows by them. On a Hopper GPU it runs there, elsewhere it is emulated.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.torch.device import is_hopper
from engine.torch.kernels import quantized
from engine.torch.kernels.base import SUMMED, Inputs
from engine.torch.kernels.cuda import grouped
from engine.torch.kernels.quantized import (
    GroupedWeight,
    dequantize,
    grouped_linear,
    random_weight,
    simplified,
    tiled,
    untiled,
)
from engine.torch.kernels.skinny import PLAIN, Fusion
from engine.torch.layers.norm import RMSNorm
from engine.torch.layers.quantized_linear import GroupedLinear
from tests.kernels.emulation import Emulated

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = sorted(grouped.LAYOUTS)
MULTIPROCESSORS = 5  # of the emulated GPU: they have different numbers of row tiles


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    if HOPPER:
        return
    folder: Path = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(grouped, "supports", grouped.covers)
    monkeypatch.setattr(grouped, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(
        grouped,
        "function",
        lambda variant, dtype: Emulated(
            "grouped_linear", ("grouped.cu",), grouped.sizes_of(variant, dtype), folder
        ),
    )


def weight_of(
    layout: tuple[int, int, bool], outputs: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> GroupedWeight:
    return random_weight(Inputs(DEVICE, dtype), outputs, size, *layout)


def expected(x: Tensor, weight: GroupedWeight, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """In float32, but for inputs that are rounded after the norm's weights."""
    norm, eps, gate, residual = fusion
    exact, scale = x.float(), 1.0
    if norm is not None:
        scale = torch.rsqrt(exact.square().mean(1, keepdim=True) + eps)
        exact = (exact * norm.float()).to(x.dtype).float()
    y = scale * (exact @ dequantize.reference(weight, torch.float32).T)
    if bias is not None:
        y += bias.float()
    return Fusion(None, 0, gate, None if residual is None else residual.float()).finished(y)


def compare(
    weight: GroupedWeight,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    norm: bool = False,
    gate: str | None = None,
    residual: bool = False,
) -> None:
    inputs = Inputs(DEVICE, dtype, seed=tokens)
    outputs, size = weight.shape
    width = outputs // 2 if gate else outputs
    x = inputs.normal(tokens, size)
    fusion = Fusion(
        inputs.normal(size) if norm else None,
        1e-5,
        gate,
        inputs.normal(tokens, width) if residual else None,
    )
    added = inputs.normal(outputs) if bias else None
    matrix = tiled(weight)
    assert grouped.suits(x, matrix, fusion)
    out = torch.full((tokens + 1, width + 8), 7.0, dtype=dtype, device=DEVICE)
    found = grouped_linear(x, matrix, added, fusion, out[:tokens, :width])
    assert (out[tokens:] == 7).all() and (out[:, width:] == 7).all()
    wanted = expected(x, weight, added, fusion)
    relative = (found.float() - wanted).norm() / wanted.norm()
    assert relative < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    tolerance = SUMMED[dtype]
    torch.testing.assert_close(
        found.float(), wanted, rtol=tolerance.relative, atol=tolerance.absolute
    )
    counters = grouped.counters(DEVICE)
    assert not counters.any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_tiled_matrix_has_the_same_weights(layout: tuple[int, int, bool]) -> None:
    weight = weight_of(layout, 48, 384)
    matrix = tiled(weight)
    back = untiled(matrix)
    assert torch.equal(back.values, weight.values) and torch.equal(back.scales, weight.scales)
    rows = torch.tensor([3, 47, 16, 3], device=DEVICE)
    for chosen in (None, rows):
        found = dequantize(matrix, torch.float32, chosen)
        torch.testing.assert_close(found, dequantize.reference(weight, torch.float32, chosen))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_triton_kernels_read_tiled_matrices(layout: tuple[int, int, bool]) -> None:
    weight = weight_of(layout, 48, 384, torch.float16)
    x = Inputs(DEVICE, torch.float16).normal(17, 384)
    for rows in (1, 17):
        found = quantized._composed(x[:rows], tiled(weight), None, PLAIN)
        wanted = expected(x[:rows], weight, None, PLAIN)
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


def test_factors_that_are_there_twice_are_stored_once() -> None:
    inputs = Inputs(DEVICE, torch.float16)
    few = (inputs.uniform(16, 3) + 0.5).half()
    scales = few.repeat_interleave(4, dim=1)
    values = inputs.integers(256, 16, 192, dtype=torch.uint8)
    cases = {
        (4, 128, False): -8 * scales,
        (4, 128, True): -7 * scales,
        (4, 32, True): -scales * torch.arange(12, device=DEVICE),
    }
    for layout, minima in cases.items():
        weight = GroupedWeight(values, scales, minima, 4, 32)
        found = simplified(weight)
        assert found.layout == layout
        torch.testing.assert_close(
            dequantize.reference(found, torch.float32), dequantize.reference(weight, torch.float32)
        )
    alike = GroupedWeight(values, (inputs.uniform(16, 12) + 0.5).half(), None, 4, 32)
    assert simplified(alike).layout == (4, 32, False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_few_rows_times_each_layout(layout: tuple[int, int, bool], emulated: None) -> None:
    weight = weight_of(layout, 96, 1408)
    compare(weight, 1, norm=True, gate="silu")
    compare(weight, 3, residual=True)


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
def test_any_few_tokens(tokens: int, emulated: None) -> None:
    weight = weight_of((4, 32, True), 160, 640)
    compare(weight, tokens, bias=True, norm=True, gate="gelu_tanh")


def test_float16_inputs_with_quantized_matrices(emulated: None) -> None:
    for layout in ((4, 128, False), (8, 16, False)):
        compare(weight_of(layout, 64, 512), 2, torch.float16, norm=True, residual=True)


def test_parts_of_the_columns_are_added_up(emulated: None) -> None:
    """The inputs of 16 tokens leave too little room for all columns, and there is a gate."""
    weight = weight_of((4, 128, False), 64, 4096)
    variant = grouped.GroupedVariant(4, 128, False, 1, 2)
    assert grouped.split(variant, 16, 4096, 2, MULTIPROCESSORS).parts > 2
    compare(weight, 16, norm=True, gate="silu")


@pytest.mark.parametrize("units", [1, 30, 132, 900])
@pytest.mark.parametrize("columns", [128, 4096, 14336, 53248])
def test_every_split_leaves_room_for_the_matrix(units: int, columns: int) -> None:
    for tokens in range(1, grouped.MAX_TOKENS + 1):
        for layout in LAYOUTS:
            variant = grouped.GroupedVariant(*layout, 0, -(-tokens // 8))
            parts, members = grouped.split(variant, tokens, columns, units, 132)
            assert variant.stages(tokens, columns, parts) >= 2, (tokens, layout)
            assert parts <= columns // 128 and parts * members <= max(132, parts)


def test_a_fused_layer_writes_the_results_of_its_stacks_side_by_side(emulated: None) -> None:
    stacks = [weight_of((4, 32, True), 64, 256), weight_of((8, 16, False), 32, 256)]
    layer = GroupedLinear(stacks)
    assert all(stack.is_tiled for stack in layer.stacks)
    inputs = Inputs(DEVICE, torch.bfloat16)
    x, norm = inputs.normal(2, 256), RMSNorm(256, 1e-5).to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        norm.weight.fill_(1.0)
        found = layer.fused(x, norm=norm)
    wanted = [expected(x, stack, None, Fusion(norm.weight, 1e-5)) for stack in stacks]
    torch.testing.assert_close(found.float(), torch.cat(wanted, 1), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize(
    ("layout", "outputs", "size"),
    [((4, 16, False), 64, 256), ((4, 32, True), 72, 256), ((4, 32, True), 64, 192)],
)
def test_other_matrices_stay_as_they_are(
    layout: tuple[int, int, bool], outputs: int, size: int
) -> None:
    assert not grouped.covers(weight_of(layout, outputs, size))
