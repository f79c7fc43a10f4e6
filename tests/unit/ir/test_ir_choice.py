"""What the planner chooses for a step: the kernel by machine and weights, the thread split."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from engine.ir.choice import attention_kernel, matmul_kernel
from engine.ir.models.decoder import build_graph
from engine.ir.plan import (
    AttentionStep,
    Capacity,
    ExecutionPlan,
    Kernel,
    LinearStep,
    Machine,
    Precision,
    Split,
)
from engine.ir.planner import plan
from tests.support.references.ir_driver import CONFIGS

QUANTIZED = ("Q4", "Q4G16", "Q8", "Q8M", "Q8G16")
HALVES = ("F16", "BF16")
PLAIN = Machine(threads=2, instruction_set="avx2", has_bf16=False)
ARM = Machine(threads=2, instruction_set="neon", has_bf16=False)
WITH_BF16 = Machine(threads=2, instruction_set="avx512_bf16", has_bf16=True)
WITH_TILES = Machine(threads=2, instruction_set="amx", has_bf16=True)
MACHINES = (PLAIN, ARM, WITH_BF16, WITH_TILES)
STORED, EXACT = Precision(), Precision(exact=True, kv_type="float32")
FLOAT = Kernel("f32", "f32")


def linears(made: ExecutionPlan) -> list[LinearStep]:
    return [step for step in made.steps if isinstance(step, LinearStep)]


def by_part(**layouts: str) -> Callable[[str], str]:
    """Layouts by what is in a weight's name; Q4 where nothing fits."""
    return lambda name: next((layouts[each] for each in layouts if each in name), "Q4")


@pytest.mark.parametrize("layout", QUANTIZED)
def test_matmul_kernels_for_quantized_weights(layout: str) -> None:
    assert matmul_kernel(layout, PLAIN, STORED) == Kernel("int8", "int8_outliers")
    assert matmul_kernel(layout, ARM, STORED) == Kernel("int8", "int8_outliers")
    assert matmul_kernel(layout, ARM, STORED, few_rows=True) == Kernel("int8", "int8_outliers")
    assert matmul_kernel(layout, WITH_BF16, STORED) == Kernel("int8", "bf16")
    assert matmul_kernel(layout, WITH_TILES, STORED) == Kernel("int8", "bf16")


def test_layers_that_only_logits_read_use_the_decode_kernel_in_prefill() -> None:
    made = plan(build_graph(CONFIGS["llama"]), Capacity(64, 8), WITH_TILES, by_part())
    *tokens, out, gate_up, down, head = linears(made)
    assert {step.kernel for step in tokens} == {Kernel("int8", "bf16")}
    assert {step.kernel for step in (out, gate_up, down, head)} == {Kernel("int8", "int8")}


@pytest.mark.parametrize("layout", HALVES)
def test_matmul_kernels_for_16_bit_weights(layout: str) -> None:
    assert matmul_kernel(layout, PLAIN, STORED) == FLOAT
    assert matmul_kernel(layout, WITH_BF16, STORED) == Kernel("f32", "bf16")


@pytest.mark.parametrize("machine", MACHINES)
def test_float_weights_and_exact_precision_use_float_kernels(machine: Machine) -> None:
    assert matmul_kernel("F32", machine, STORED) == FLOAT
    for layout in (*QUANTIZED, *HALVES, "F32"):
        assert matmul_kernel(layout, machine, EXACT) == FLOAT


def test_prefill_attention_uses_amx_tiles_only_with_a_bf16_cache() -> None:
    assert attention_kernel(WITH_TILES, STORED) == Kernel("f32", "bf16")
    assert attention_kernel(WITH_TILES, Precision(kv_type="int8")) == FLOAT
    assert attention_kernel(WITH_TILES, EXACT) == FLOAT
    assert attention_kernel(WITH_BF16, STORED) == attention_kernel(PLAIN, STORED) == FLOAT


def test_every_plan_step_carries_its_chosen_kernel() -> None:
    """A file as they are often made: the head wider than the rest, one part of each layer too."""
    layout_of = by_part(head="Q8", v="F16", embed="F32")
    made = plan(build_graph(CONFIGS["qwen2"]), Capacity(8, 8), WITH_TILES, layout_of)
    kernels = {step.matrix: step.kernel for step in linears(made)}
    assert kernels["layers.0.attn.q_k.weight"] == Kernel("int8", "bf16")
    assert kernels["layers.0.attn.v.weight"] == Kernel("f32", "bf16")
    assert kernels["head.weight"] == Kernel("int8", "int8")
    layouts = {matrix.name: matrix.layout for matrix in made.matrices}
    assert layouts["embed.weight"] == "F32" and layouts["head.weight"] == "Q8"
    for step in linears(made):
        few = made.buffers[step.out].per == "logit"
        assert step.kernel == matmul_kernel(layouts[step.matrix], WITH_TILES, STORED, few)
    attention = [step for step in made.steps if isinstance(step, AttentionStep)]
    assert {step.kernel for step in attention} == {Kernel("f32", "bf16")}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("precision", [STORED, EXACT])
def test_the_kernel_choice_does_not_depend_on_the_step_size(
    machine: Machine, precision: Precision
) -> None:
    graph = build_graph(CONFIGS["llama"])
    one, many = (
        plan(graph, Capacity(tokens, tokens), machine, by_part(down="Q8M"), precision)
        for tokens in (1, 512)
    )
    assert [step.kernel for step in linears(one)] == [step.kernel for step in linears(many)]


def test_work_claims_are_shared_evenly_and_large_enough() -> None:
    config = replace(CONFIGS["llama"], hidden_size=576, intermediate_size=1536, vocab_size=49152)
    graph = build_graph(config)
    alone, few, many = (plan(graph, Capacity(tokens, tokens), PLAIN) for tokens in (1, 8, 512))
    single = plan(graph, Capacity(1, 1), msgspec.structs.replace(PLAIN, threads=1))
    for index, step in enumerate(linears(alone)):
        matrix = next(each for each in alone.matrices if each.name == step.matrix)
        units = -(-matrix.rows // (32 if step.gated else 16))
        splits = [linears(each)[index].split for each in (alone, few, many)]
        assert {split.units for split in splits} == {units}
        grains = [split.grain for split in splits]
        assert sorted(grains, reverse=True) == grains, "more rows, finer shares"
        assert 1 <= grains[0] <= max(1, units // 8), "four claims for each thread at least"
        assert linears(single)[index].split == Split(units, units)
    assert linears(alone)[-1].split.grain > 1
    assert all(step.split.grain == 1 for step in linears(many))
