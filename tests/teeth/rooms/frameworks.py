"""Mistakes in the frameworks: what they share, and the Python side of each."""

from tests.teeth.mutation import Mutation

PART_TESTS = "tests/unit/test_framework_parts.py"
LAYER_TESTS = "tests/unit/test_framework_layers.py"
CONFORMANCE = "tests/parity/test_runner_conformance.py"
STEADY = "test_steady_draws_are_the_host_samplers"

MUTATIONS = [
    Mutation(
        "frameworks: a forced token is kept as the slot's last",
        "engine.backends.custom.frameworks.settings",
        "np.where(sampling.forced == SAMPLE, sampling.slots, np.int32(spare_slot))",
        "sampling.slots",
        f"{PART_TESTS}::test_every_setting_arrives_as_it_was_given",
    ),
    Mutation(
        "frameworks: rows that pad a step keep tokens of slot 0",
        "engine.backends.custom.frameworks.layout",
        "                buffer[end : start + size] = self._pads[name]\n",
        "                buffer[end : start + size] = 0\n",
        f"{PART_TESTS}::test_rows_that_pad_a_step_choose_plainly_and_are_kept_for_nobody",
    ),
    Mutation(
        "frameworks: the rest of a row is cut off",
        "engine.backends.custom.frameworks.runs",
        "    each = -(-counts // size)\n",
        "    each = counts // size\n",
        f"{PART_TESTS}::test_rows_are_cut_into_runs_that_cover_them",
    ),
    Mutation(
        "frameworks: native's last token is another slot's",
        "engine.backends.custom.frameworks.native.execution.runner",
        "        self._last_token[sampling.slots[sampled]] = tokens[sampled]\n",
        "        self._last_token[: len(tokens)] = tokens\n",
        "tests/unit/test_native_runner.py::test_a_token_that_the_host_does_not_know_is_the_slots_last",
    ),
    Mutation(
        "frameworks: native reads the norm of keys for queries",
        "engine.backends.custom.frameworks.native.execution.program",
        "query_norm=weights.vector(step.q_norm),",
        "query_norm=weights.vector(step.k_norm),",
        "tests/parity/test_native_models.py::test_logits_equal_hugging_face[qwen3]",
    ),
    Mutation(
        "frameworks: native attends without a window",
        "engine.backends.custom.frameworks.native.execution.program",
        "        window=step.window or 0,\n",
        "        window=0,\n",
        "tests/parity/test_native_models.py::test_logits_equal_hugging_face[mistral-window]",
    ),
    Mutation(
        "frameworks: native rotates all layers by the first RoPE table",
        "engine.backends.custom.frameworks.native.execution.program",
        "        rope=step.table,\n",
        "        rope=0,\n",
        "tests/unit/test_native_graphs.py::test_logits_are_those_of_the_graph[ropes]",
    ),
    Mutation(
        "frameworks: native packs the first expert for all",
        "engine.backends.custom.frameworks.native.weights.loading",
        "_part(each.expert(expert) if matrix.experts else each)",
        "_part(each.expert(0) if matrix.experts else each)",
        "tests/unit/test_native_graphs.py::test_logits_are_those_of_the_graph[experts]",
    ),
    Mutation(
        "frameworks: torch forgets a slot's history when others join",
        "engine.backends.custom.frameworks.torch.execution.history",
        "        self._num_prompt[sampling.history_slots] = sampling.history_num_prompt\n",
        "        self._num_prompt[:] = sampling.history_num_prompt[0]\n",
        f"{CONFORMANCE}::TestTorch::{STEADY}",
    ),
    Mutation(
        "frameworks: torch appends a drawn token one place too early",
        "engine.backends.custom.frameworks.torch.execution.history",
        "        self._tokens[slots, positions] = tokens\n",
        "        self._tokens[slots, positions - 1] = tokens\n",
        f"{CONFORMANCE}::TestTorch::{STEADY}",
    ),
    Mutation(
        "frameworks: torch keeps one token too few of top-k",
        "engine.backends.custom.frameworks.torch.execution.sampler",
        "to_device(counts[rows] - 1, logits.device)",
        "to_device(np.maximum(counts[rows] - 2, 0), logits.device)",
        "tests/unit/test_torch_sampler.py::test_filters_keep_every_tie",
    ),
    Mutation(
        "frameworks: torch rotates the halves of a head the other way",
        "engine.backends.custom.frameworks.torch.layers.rotary",
        "torch.stack((-sin, sin), dim=1)",
        "torch.stack((sin, -sin), dim=1)",
        "tests/parity/test_torch_models.py"
        "::test_every_layer_and_the_logits_equal_hugging_face[llama-tied]",
    ),
    Mutation(
        "frameworks: torch sees one position beyond the window",
        "engine.backends.custom.frameworks.torch.kernels.attention_heads",
        "hidden |= distance >= window",
        "hidden |= distance > window",
        "tests/parity/test_torch_models.py"
        "::test_every_layer_and_the_logits_equal_hugging_face[mistral-window]",
    ),
    Mutation(
        "frameworks: torch gives all layers the window of the first",
        "engine.backends.custom.frameworks.torch.layers.attention",
        "self.window = config.layer(layer).window",
        "self.window = config.layer(0).window",
        "tests/parity/test_torch_models.py"
        "::test_every_layer_and_the_logits_equal_hugging_face[gemma2]",
    ),
    Mutation(
        "frameworks: torch takes all sinks for zero",
        "engine.backends.custom.frameworks.torch.kernels.attention_heads",
        "(scores, sinks.float().expand(",
        "(scores, (0 * sinks).expand(",
        "tests/parity/test_torch_models.py"
        "::test_every_layer_and_the_logits_equal_hugging_face[gpt_oss]",
    ),
    Mutation(
        "frameworks: torch renormalizes the shares of experts that keep theirs",
        "engine.backends.custom.frameworks.torch.kernels.experts",
        "    if experts.renormalizes:\n",
        '    if experts.scoring == "softmax":\n',
        "tests/parity/test_torch_models.py"
        "::test_every_layer_and_the_logits_equal_hugging_face[olmoe]",
    ),
    Mutation(
        "frameworks: torch's grouped GEMM loses the pairs of an expert's second block",
        "engine.backends.custom.frameworks.torch.kernels.triton.experts",
        "        tl.store(fields + 1, first)\n",
        "        tl.store(fields + 1, start)\n",
        "tests/kernels/test_experts.py::test_pairs_are_sorted_into_blocks",
    ),
    Mutation(
        "frameworks: JAX penalizes presence by number",
        "engine.backends.custom.frameworks.jax.execution.sampler",
        '    return penalized - settings["presence"][:, None] * (num_output > 0)\n',
        '    return penalized - settings["presence"][:, None] * num_output\n',
        "tests/unit/test_jax_sampler.py::test_penalties_by_hand",
    ),
    Mutation(
        "frameworks: JAX sees one position beyond the window",
        "engine.backends.custom.frameworks.jax.kernels.work",
        "distance < scoring.window",
        "distance <= scoring.window",
        f"{LAYER_TESTS}::test_a_sequence_attends_to_what_came_before_it",
    ),
    Mutation(
        "frameworks: JAX's items of single queries are not first",
        "engine.backends.custom.frameworks.jax.execution.buckets",
        "np.argsort(lengths != 1, kind",
        "np.argsort(lengths == 1, kind",
        f"{LAYER_TESTS}::test_attention_items_cover_each_row_and_single_queries_come_first",
    ),
    Mutation(
        "frameworks: JAX norms keys by the weight of queries",
        "engine.backends.custom.frameworks.jax.layers.attention",
        'k = rms_norm(params["k_norm"], k, config.norm_eps)\n    if rotation',
        'k = rms_norm(params["q_norm"], k, config.norm_eps)\n    if rotation',
        f"{LAYER_TESTS}::test_heads_are_cut_from_their_products_normed_and_turned",
    ),
    Mutation(
        "frameworks: tinygrad activates the wrong half",
        "engine.backends.custom.frameworks.tinygrad.layers.mlp",
        "    return ACTIVATIONS[activation](gate) * up\n",
        "    return ACTIVATIONS[activation](up) * gate\n",
        f"{LAYER_TESTS}::test_feed_forward_halves",
    ),
    Mutation(
        "frameworks: tinygrad's norm has no epsilon",
        "engine.backends.custom.frameworks.tinygrad.layers.norm",
        "keepdim=True) + eps).rsqrt()",
        "keepdim=True)).rsqrt()",
        f"{LAYER_TESTS}::test_norms",
    ),
    Mutation(
        "frameworks: JAX ranks a group by its best expert alone",
        "engine.backends.custom.frameworks.jax.layers.experts",
        'considered = 1 if config.group_score == "best" else 2',
        "considered = 1",
        f"{LAYER_TESTS}::test_a_router_chooses_and_weights_experts",
    ),
    Mutation(
        "frameworks: JAX starts each run of an expert at its first token",
        "engine.backends.custom.frameworks.jax.kernels.experts",
        "start = (ends - sizes)[expert] + earlier * size",
        "start = (ends - sizes)[expert]",
        f"{LAYER_TESTS}::test_both_ways_to_run_experts_in_jax_give_each_token_its_own",
    ),
    Mutation(
        "frameworks: JAX weights experts by the corrected scores",
        "engine.backends.custom.frameworks.jax.layers.experts",
        "jnp.take_along_axis(scores, chosen, axis=1)",
        "jnp.take_along_axis(ranked, chosen, axis=1)",
        f"{LAYER_TESTS}::test_a_router_chooses_and_weights_experts",
    ),
    Mutation(
        "frameworks: tinygrad gives equal experts the same rank",
        "engine.backends.custom.frameworks.tinygrad.layers.experts",
        "((other > own) | ((other == own) & is_before))",
        "(other > own)",
        f"{LAYER_TESTS}::test_of_equal_experts_the_first_is_chosen",
    ),
    Mutation(
        "frameworks: tinygrad's shared expert has no gate",
        "engine.backends.custom.frameworks.tinygrad.layers.experts",
        "    if config.shared_gate:\n",
        "    if not config.shared_gate:\n",
        f"{LAYER_TESTS}::test_a_token_sums_its_experts_and_the_shared_expert",
    ),
    Mutation(
        "frameworks: settings of experts that no decoder knows are ignored",
        "engine.backends.custom.frameworks.parameters",
        "    if config.experts is not None:\n",
        "    if config.experts is None:\n",
        f"{PART_TESTS}::test_a_setting_that_no_decoder_knows_is_refused_by_name",
    ),
    Mutation(
        "frameworks: slopes between powers of two come first",
        "engine.backends.custom.ir.reference",
        "(slopes[1::2], slopes[::2])",
        "(slopes[::2], slopes[1::2])",
        f"{PART_TESTS}::test_alibi_slopes_of_six_heads_are_those_between_eight",
    ),
    Mutation(
        "native: a short context rotates by the factors for long texts",
        "engine.backends.custom.frameworks.native.execution.build",
        "rope, max_seq_len, None if factors",
        "rope, model_config.max_position, None if factors",
        "tests/parity/test_native_models.py"
        "::test_a_short_context_rotates_by_the_factors_for_short_texts",
    ),
]
