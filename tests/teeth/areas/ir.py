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
        "tests/unit/ir/test_ir_choice.py::test_quantized_weights[Q4]",
    ),
    Mutation(
        "ir: a token chooses experts of all groups",
        "engine.ir.reference",
        "    if routing.groups == 1:\n        return ranks\n",
        "    return ranks\n",
        "tests/unit/native/test_native_graphs.py"
        "::test_logits_are_those_of_the_graph[grouped experts]",
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
        f"{GRAPH_TESTS}::test_use_before_definition",
    ),
    Mutation(
        "ir: a node is believed what it says of its shape",
        "engine.ir.graph",
        "    if inferred != node.value:\n",
        "    if False:\n",
        f"{GRAPH_TESTS}::test_a_value_that_is_not_what_the_node_makes",
    ),
    Mutation(
        "ir: a norm that others read is dropped",
        "engine.ir.fusion",
        "if not users or any(user.op not in _MATMULS for user in users):",
        "if not users or all(user.op not in _MATMULS for user in users):",
        f"{FUSION_TESTS}::test_a_norm_that_others_read_stays",
    ),
    Mutation(
        "ir: a residual is overwritten before its last reader",
        "engine.ir.fusion",
        "last_user(kept) is not node:\n                continue\n            attributes = replace",
        "last_user(kept) is None:\n                continue\n            attributes = replace",
        f"{FUSION_TESTS}::test_a_residual_that_is_read_later_is_not_overwritten",
    ),
    Mutation(
        "ir: norms of different epsilons become one",
        "engine.ir.fusion",
        "    if len(dims) > 1 or len(kinds) > 1:\n",
        "    if len(dims) > 1:\n",
        f"{FUSION_TESTS}"
        "::test_queries_and_keys_that_are_treated_differently_are_not_written_together",
    ),
    Mutation(
        "ir: columns of keys begin where those of queries do",
        "engine.ir.fusion",
        "            start = stop\n",
        "            start = 0\n",
        f"{FUSION_TESTS}::test_results_are_unchanged",
    ),
    Mutation(
        "ir: products of one step are written over each other",
        "engine.ir.lowering",
        "            column += matrix.rows\n",
        "            column += 0\n",
        f"{PLAN_TESTS}::test_unlike_parts_of_qkv_get_a_step_each",
    ),
    Mutation(
        "ir: a step reads and writes one place",
        "engine.ir.liveness",
        "        free_from[place] = span.last + 1\n",
        "        free_from[place] = span.last\n",
        f"{PLAN_TESTS}::test_random_lives_never_collide",
    ),
    Mutation(
        "ir: lives that meet in a step do not overlap",
        "engine.ir.liveness",
        "self.first <= other.last and other.first <= self.last",
        "self.first <= other.last and other.first < self.last",
        f"{PLAN_TESTS}::test_lives_that_meet_in_one_step_overlap",
    ),
    Mutation(
        "ir: the output's place is taken by a later step",
        "engine.ir.liveness",
        "    last[output] = len(steps) - 1\n",
        "",
        f"{PLAN_TESTS}::test_the_output_outlives_the_steps_behind_it",
    ),
    Mutation(
        "ir: attention is priced without its window",
        "engine.ir.cost",
        "        seen = min(counts.context, step.window or counts.context)\n",
        "        seen = counts.context\n",
        f"{PLAN_TESTS}::test_costs_grow_with_rows_while_weights_are_read_once",
    ),
    Mutation(
        "ir: yarn keeps what it should stretch",
        "engine.ir.rotary",
        "1 - stretched, rope.factor)",
        "stretched, rope.factor)",
        "tests/unit/architectures/test_rotary.py"
        "::test_yarn_keeps_what_turns_often_and_stretches_what_hardly_does",
    ),
    Mutation(
        "ir: dynamic scaling forgets the longest length",
        "engine.ir.rotary",
        "    length = max(max_seq_len, original)\n",
        "    length = original\n",
        "tests/unit/architectures/test_rotary.py"
        "::test_dynamic_depends_on_the_longest_length_once_it_exceeds_the_trained_one",
    ),
]
