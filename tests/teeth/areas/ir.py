"""Mistakes in graphs and plans: rules, fusions, steps, places, prices."""

from tests.teeth.mutation import Mutation

GRAPH_TESTS = "tests/unit/ir/test_ir_graph.py"
FUSION_TESTS = "tests/unit/ir/test_ir_fusion.py"
PLAN_TESTS = "tests/unit/ir/test_ir_plan.py"

MUTATIONS = [
    Mutation(
        "ir: without bfloat16, prefill rounds outliers as decode does",
        "engine.ir.choice",
        '    return Kernel(decode, "int8_outliers" if decode == "int8" else decode)\n',
        "    return Kernel(decode, decode)\n",
        "tests/unit/ir/test_ir_choice.py::test_matmul_kernels_for_quantized_weights[Q4]",
    ),
    Mutation(
        "ir: a token chooses experts of all groups",
        "engine.ir.reference",
        "    if routing.groups == 1:\n        return ranks\n",
        "    return ranks\n",
        "tests/unit/native/test_native_graphs.py"
        "::test_native_logits_equal_the_graph[grouped experts]",
    ),
    Mutation(
        "ir: the MLP of a parallel layer reads what attention wrote",
        "engine.ir.models.decoder",
        '    inner = builder.mlp(builder.read(x, f"{name}.mlp_norm", weight), layer)\n'
        '    x = builder.merge(x, builder.out_projection(heads, layer), f"{name}.attn")\n',
        '    x = builder.merge(x, builder.out_projection(heads, layer), f"{name}.attn")\n'
        '    inner = builder.mlp(builder.read(x, f"{name}.mlp_norm", weight), layer)\n',
        "tests/parity/models/test_ir_models.py::test_graph_and_plan_equal_hugging_face[cohere2]",
    ),
    Mutation(
        "ir: a value may be used before it is made",
        "engine.ir.graph",
        "        if name in values:\n            continue\n",
        "        if name in values or name in names:\n            continue\n",
        f"{GRAPH_TESTS}::test_a_value_used_before_its_definition_is_refused",
    ),
    Mutation(
        "ir: a node is believed what it says of its shape",
        "engine.ir.graph",
        "    if inferred != node.value:\n",
        "    if False:\n",
        f"{GRAPH_TESTS}::test_a_declared_value_that_differs_from_the_inferred_one_is_refused",
    ),
    Mutation(
        "ir: a norm that others read is dropped",
        "engine.ir.fusion",
        "if not users or any(user.op not in _MATMULS for user in users):",
        "if not users or all(user.op not in _MATMULS for user in users):",
        f"{FUSION_TESTS}::test_a_norm_with_other_readers_is_not_fused",
    ),
    Mutation(
        "ir: a residual is overwritten before its last reader",
        "engine.ir.fusion",
        "kept not in graph.inputs and edit.last_user(kept) is node:\n",
        "kept not in graph.inputs:\n",
        f"{FUSION_TESTS}::test_a_residual_that_is_read_later_is_not_overwritten",
    ),
    Mutation(
        "ir: norms of different epsilons become one",
        "engine.ir.fusion",
        "    if len(dims) > 1 or len(kinds) > 1:\n",
        "    if len(dims) > 1:\n",
        f"{FUSION_TESTS}::test_queries_and_keys_with_different_rope_are_not_fused",
    ),
    Mutation(
        "ir: columns of keys begin where those of queries do",
        "engine.ir.fusion",
        "            start = stop\n",
        "            start = 0\n",
        f"{FUSION_TESTS}::test_each_fusion_pass_keeps_the_results",
    ),
    Mutation(
        "ir: products of one step are written over each other",
        "engine.ir.lowering",
        "            column += matrix.rows\n",
        "            column += 0\n",
        f"{PLAN_TESTS}::test_q_k_v_of_different_layouts_get_separate_steps",
    ),
    Mutation(
        "ir: a step reads and writes one place",
        "engine.ir.liveness",
        "        free_from[place] = span.last + 1\n",
        "        free_from[place] = span.last\n",
        f"{PLAN_TESTS}::test_random_buffer_lifetimes_never_collide",
    ),
    Mutation(
        "ir: lives that meet in a step do not overlap",
        "engine.ir.liveness",
        "self.first <= other.last and other.first <= self.last",
        "self.first <= other.last and other.first < self.last",
        f"{PLAN_TESTS}::test_buffer_lifetimes_that_meet_in_one_step_overlap",
    ),
    Mutation(
        "ir: the output's place is taken by a later step",
        "engine.ir.liveness",
        "    last[output] = len(steps) - 1\n",
        "",
        f"{PLAN_TESTS}::test_the_output_buffer_lives_until_the_last_step",
    ),
    Mutation(
        "ir: attention is priced without its window",
        "engine.ir.cost",
        "        seen = min(counts.context, step.window or counts.context)\n",
        "        seen = counts.context\n",
        f"{PLAN_TESTS}::test_plan_costs_grow_with_rows_while_weights_are_read_once",
    ),
    Mutation(
        "ir: yarn keeps what it should stretch",
        "engine.ir.rotary",
        "1 - stretched, rope.factor)",
        "stretched, rope.factor)",
        "tests/unit/architectures/test_rotary.py"
        "::test_yarn_keeps_high_frequencies_and_stretches_low_ones",
    ),
    Mutation(
        "ir: dynamic scaling forgets the longest length",
        "engine.ir.rotary",
        "    length = max(max_seq_len, original)\n",
        "    length = original\n",
        "tests/unit/architectures/test_rotary.py"
        "::test_dynamic_rope_changes_only_beyond_the_trained_length",
    ),
]
