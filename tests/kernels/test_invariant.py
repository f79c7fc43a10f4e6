"""`--numerics invariant`: the bits of a row's results do not depend on the other rows.

The interpreter multiplies matrices by BLAS, whose order of sums depends on the place of a row in
its tile. A tensor core's does not. So here a product is one chain of additions for each element.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.torch.execution import step_sizes
from engine.torch.execution.cuda_runner import CudaRunner
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_spec import batch_of
from engine.torch.kernels.base import KERNELS, Inputs, interpreting
from engine.torch.kernels.experts import ExpertMatrices
from engine.torch.kernels.fp8 import quantize_rows, scaled_linear
from engine.torch.kernels.invariant import attention as invariant
from engine.torch.kernels.invariant import linear as library
from engine.torch.kernels.skinny import PLAIN, Fusion
from engine.torch.kernels.triton import experts
from engine.torch.kernels.triton.invariant import linear
from engine.torch.kernels.triton.invariant.linear import LinearTile
from engine.torch.layers.invariant_linear import make_invariant
from engine.torch.models.loading import build_model
from engine.weights.model import open_model
from tests.kernels.stand_ins import config, stand_in
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver

CPU = torch.device("cpu")
BLOCK_SIZE, CHUNK = 4, 32


@pytest.fixture(autouse=True)
def products_are_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreting():
        return
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def chain(self, left, right, total, precision, imprecise):  # type: ignore[no-untyped-def]
        if left.dtype.primitive_bitwidth == 8:  # float8 numbers: all sums are exact here
            return plain(self, left, right, total, precision, imprecise)
        a, b = left.data.astype(np.float32), right.data.astype(np.float32)
        sums = total.data
        for column in range(a.shape[1]):
            sums = sums + a[:, column, None] * b[None, column]
        return interpreter.TensorHandle(sums, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)


@pytest.mark.parametrize("parts", ["residual", "gate", "bias", "bias and gate"])
def test_a_row_of_a_matmul_is_bit_identical_in_every_batch(
    parts: str, device: torch.device
) -> None:
    """It is what a library's product gives, with the other parts after it."""
    outputs = 72
    inputs = Inputs(device, torch.float16)
    x, weight = inputs.normal(70, 600), inputs.normal(outputs, 600, scale=0.04)
    residual = inputs.normal(70, outputs) if parts == "residual" else None
    bias = inputs.normal(outputs) if "bias" in parts else None
    gate = "silu" if "gate" in parts else None

    def product(rows: slice, tile: LinearTile | None = None) -> Tensor:
        given = None if residual is None else residual[rows]
        fusion = Fusion(gate=gate, residual=given)
        return linear.invariant_linear(x[rows], weight, bias, fusion, tile)

    whole = product(slice(0, 70), LinearTile(64, 64, 128, 4, 2))
    for first, last in ((0, 1), (69, 70), (3, 20)):
        assert torch.equal(product(slice(first, last)), whole[first:last])
    assert torch.equal(product(slice(0, 70), LinearTile(16, 256, 64, 8, 2)), whole)
    y = linear.invariant_linear(x, weight, None, PLAIN)
    y = y if bias is None else y + bias
    assert torch.equal(Fusion(gate=gate, residual=residual).finished(y), whole)


def test_cublas_is_used_only_for_shapes_where_its_bits_equal_ours(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that adds in another order for 40 rows is not used for 40 rows."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = KERNELS["invariant_linear"].triton(x, weight, None, PLAIN)
        return torch.nextafter(y, y + 1) if len(x) == 40 else y

    weight = torch.ones(8, 24, device=device)
    monkeypatch.setattr(library, "_EQUAL", {})
    monkeypatch.setattr(library, "F", SimpleNamespace(linear=multiply))
    assert library.compare_library(weight, (8, 17, 40, 41)) == {8, 17, 41}
    used = [count for count in range(50) if library.suits_library(torch.ones(count, 24), weight)]
    assert used == [17, 41]  # for 8 rows, our kernel is faster; other numbers were not compared
    assert not library.suits_library(torch.ones(17, 24), torch.ones(9, 24))


ROWS = ((70, 1), (70, 23), (1, 1), (70, 2), (34, 34))
ALONE = ((70, 1), (33, 1))


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "alibi"),
    [
        (None, None, False, None),
        (21, None, True, None),
        pytest.param(None, 30.0, False, None, marks=pytest.mark.slow),
        pytest.param(None, None, False, 8.0, marks=pytest.mark.slow),
    ],
)
def test_attention_of_a_query_is_bit_identical_in_every_batch(
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    alibi: float | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All sequences have the same keys. So a query at a position has one result, whether its row
    has other queries or not, and whether one program has all its chunks or several.
    """
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    heads = AttentionHeads(
        6, 2, 24, 24**-0.5, (window,), softcap, has_sinks=has_sinks, alibi_bias=alibi
    )
    inputs = Inputs(device, torch.float32)
    cache = inputs.normal(19, BLOCK_SIZE, 2, 2, 24)
    at_position, sinks = inputs.normal(70, 6, 24), inputs.normal(6) if has_sinks else None
    table = np.arange(1, 19, dtype=np.int32)

    def attended(rows: tuple[tuple[int, int], ...]) -> list[tuple[int, Tensor]]:
        batch = batch_of(rows, np.tile(table, (len(rows), 1)))
        positions = [keys - queries + i for keys, queries in rows for i in range(queries)]
        q, zeros = at_position[positions], torch.zeros(len(positions), dtype=torch.int64)
        ours, reference = (
            kind(heads, block_size=BLOCK_SIZE, dtype=torch.float32)
            for kind in (invariant.InvariantAttention, ReferenceAttention)
        )
        plan = ours.plan(batch, zeros.to(device))
        out = plan.attend(q, q, q, cache, window=window, sinks=sinks)
        expected = reference.plan(batch, torch.tensor(positions, device=device))
        torch.testing.assert_close(
            out, expected.attend(q, q, q, cache, window=window, sinks=sinks), atol=1e-5, rtol=1e-5
        )
        return list(zip(positions, out, strict=True))

    results: dict[int, Tensor] = {}
    alone = [attended((row,)) for row in ALONE]
    for position, result in [*attended(ROWS), *(pair for run in alone for pair in run)]:
        assert torch.equal(results.setdefault(position, result), result), position


def test_long_rows_are_split_until_partial_result_memory_is_full() -> None:
    heads = AttentionHeads(32, 8, 64, 0.125)
    ours = invariant.InvariantAttention(heads, block_size=16, dtype=torch.bfloat16)
    lengths = (200_000, 256, 257, 400_000, 1, 3_000)
    rows = tuple((length, 1) for length in lengths)
    lists, room = ours.lists(batch_of(rows, np.zeros((len(rows), 1), np.int32)))
    counts = lists["partials"][:, 1].tolist()
    assert counts == [782, 1, 1, 1, 1, 1]  # the second long row has no room
    most = ours.room_for(6, 6, only_decodes=True, shares=False)
    assert room.spans == len(lists["spans"]) <= most.spans
    for row, length in enumerate(lengths):
        spans = lists["spans"][lists["spans"][:, 0] == row]
        spans = spans[np.argsort(spans[:, 1])]
        assert spans[0, 1] == 0 and spans[-1, 1] < length <= spans[-1, 2]
        assert (spans[1:, 1] == spans[:-1, 2]).all() and not (spans[:, 1] % invariant.CHUNK).any()
    lone, _ = ours.lists(batch_of(((4096, 1),), np.zeros((1, 1), np.int32)))
    assert len(lone["spans"]) == 16 and lone["partials"].tolist() == [[0, 16]]


def test_a_row_of_a_float8_matmul_is_bit_identical_in_every_batch(device: torch.device) -> None:
    inputs = Inputs(device, torch.float16)
    x, weight = inputs.normal(40, 96), quantize_rows(inputs.normal(80, 96))
    scale = weight.scales[:, 0].contiguous()

    def product(rows: Tensor) -> Tensor:
        return scaled_linear(
            quantize_rows(rows), weight.values, scale, None, torch.float16, invariant=True
        )

    whole = product(x)
    for first, last in ((0, 1), (39, 40), (3, 20)):
        assert torch.equal(product(x[first:last]), whole[first:last])


def test_a_tokens_experts_do_not_depend_on_the_other_tokens(device: torch.device) -> None:
    inputs = Inputs(device, torch.float16)
    x, ids = inputs.normal(60, 48), inputs.integers(3, 60, 2).int()
    shares = inputs.uniform(60, 2)
    gate_up, down = inputs.normal(3, 64, 48, scale=0.1), inputs.normal(3, 48, 32, scale=0.1)

    def mixed(rows: slice) -> Tensor:
        matrices = ExpertMatrices(gate_up, down, None, None, "silu")
        return experts.experts_mlp(x[rows], shares[rows], ids[rows], matrices)

    whole = mixed(slice(0, 60))
    for first, last in ((0, 1), (59, 60), (5, 9)):
        assert torch.equal(mixed(slice(first, last)), whole[first:last])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/parity has this test for a GPU")
@pytest.mark.slow  # interpreted; the quick tests check each kernel
@pytest.mark.parametrize("name", ["llama", "qwen3_moe-dense"])
def test_logits_of_a_request_are_bit_identical_alone_and_batched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in one chunk, and with others in chunks of four tokens, one of which has one token. A
    chunk of nine tokens has no graph.
    """
    stand_in(monkeypatch)
    monkeypatch.setattr(step_sizes, "TOKEN_SIZES", (4, 8))
    monkeypatch.setattr(step_sizes, "TOKEN_STEP", 4)
    monkeypatch.setattr(tiny_models, "NUM_LAYERS", 2)
    monkeypatch.setitem(tiny_models.COMMON, "num_hidden_layers", 2)
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    _, path = tiny_models.save(name, tmp_path)
    source = open_model(path)
    model = build_model(source.config, source.weights, tiny_models.MAX_POSITION, CPU, torch.float32)
    make_invariant(model)
    given = replace(config("auto"), numerics="invariant")
    texts = [tiny_models.text(length, seed) for seed, length in enumerate((9, 1, 6))]

    def driver() -> RunnerDriver:
        runner = CudaRunner(model, given, CPU, torch.float32)
        runner._capturer.runner = runner  # type: ignore[attr-defined]
        return RunnerDriver(runner)

    alone = []
    for text in texts[:1]:
        own = driver()
        track = own.add(text)
        outputs = [own.step([(track, len(text))], num_logprobs=[3])]
        outputs += [own.step([(track, 1)], num_logprobs=[3]) for _ in range(2)]
        alone.append([(each.tokens[0], *each.top_logprobs[0]) for each in outputs])
    shared = driver()
    first, second, third = (shared.add(text) for text in texts)
    shared.step([(second, 1), (first, 4)], num_logprobs=[-1])
    shared.step([(first, 4), (third, 4)])
    outputs = [shared.step([(third, 2), (first, 1)], num_logprobs=[3, 3])]
    outputs += [
        shared.step([(second, 1), (first, 1), (third, 1)], num_logprobs=[3] * 3) for _ in "ab"
    ]
    company = [(each.tokens[1], *each.top_logprobs[1]) for each in outputs]
    assert company == alone[0]
