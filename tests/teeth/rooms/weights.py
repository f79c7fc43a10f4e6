"""Mistakes in what a checkpoint is taken for: files, shapes, types, configurations, conversions."""

from tests.teeth.mutation import Mutation

MODEL_TESTS = "tests/unit/test_gguf_model.py"
RULES = "tests/security/test_gguf_rules.py"
CONFIG_TESTS = "tests/unit/test_architectures.py"
CONVERT_TESTS = "tests/unit/test_convert.py"

MUTATIONS = [
    Mutation(
        "weights: a tensor may have its shape turned around",
        "engine.backends.custom.weights.model",
        "    if tensor.shape != expected:\n",
        "    if sorted(tensor.shape) != sorted(expected):\n",
        f"{MODEL_TESTS}::test_a_tensor_of_any_other_shape_is_refused_by_name",
    ),
    Mutation(
        "weights: a tensor may have another shape of the same size",
        "engine.backends.custom.weights.model",
        "    if tensor.shape != expected:\n",
        "    if np.prod(tensor.shape) != np.prod(expected):\n",
        f"{MODEL_TESTS}::test_a_tensor_of_any_other_shape_is_refused_by_name",
    ),
    Mutation(
        "weights: a part of a fused matrix starts at its first row",
        "engine.backends.custom.weights.weight",
        "            return stored[transform.before : transform.before + rows].reshape(-1)\n",
        "            return stored[:rows].reshape(-1)\n",
        f"{MODEL_TESTS}::test_rows_of_a_fused_matrix_are_views_of_the_file",
    ),
    Mutation(
        "weights: rows of Llama's heads stay as they were stored",
        "engine.backends.custom.weights.weight",
        "    halves = pairs.swapaxes(1, 2).reshape(len(heads), -1)\n",
        "    halves = pairs.reshape(len(heads), -1)\n",
        f"{MODEL_TESTS}::test_config_and_weights_come_back",
    ),
    Mutation(
        "weights: tensors that nobody uses are overlooked",
        "engine.backends.custom.weights.model",
        "    if extra:\n",
        "    if False:\n",
        f"{MODEL_TESTS}::test_tensors_nobody_uses_are_named",
    ),
    Mutation(
        "weights: a tied head is looked for all the same",
        "engine.backends.custom.weights.model",
        '        tie_embeddings="head.weight" not in found,\n',
        '        tie_embeddings="head.weight" in found,\n',
        f"{MODEL_TESTS}::test_config_and_weights_come_back",
    ),
    Mutation(
        "weights: a tensor may end one byte behind the file",
        "engine.backends.custom.weights.gguf_header",
        "        if start + num_bytes > cursor.size:\n",
        "        if start + num_bytes > cursor.size + 1:\n",
        f"{RULES}::test_every_cut_of_a_file_is_refused",
    ),
    Mutation(
        "weights: tensors may overlap",
        "engine.backends.custom.weights.gguf_header",
        "        if before.start + before.num_bytes > after.start:\n",
        "        if before.start > after.start:\n",
        f"{RULES}::test_damaged_file_is_refused_for_its_reason[mapped-overlap]",
    ),
    Mutation(
        "weights: rows need not be whole blocks",
        "engine.backends.custom.weights.gguf_header",
        "    if dims[0] % traits.block_elems:\n",
        "    if prod(dims) % traits.block_elems:\n",
        f"{RULES}::test_damaged_file_is_refused_for_its_reason[mapped-two rows of half a block]",
    ),
    Mutation(
        "weights: dimensions are read in the file's order",
        "engine.backends.custom.weights.gguf_header",
        "    return name, tuple(reversed(dims)), traits, offset\n",
        "    return name, tuple(dims), traits, offset\n",
        "tests/unit/test_gguf.py::test_values_are_those_written",
    ),
    Mutation(
        "weights: high halves of bytes come first",
        "engine.backends.custom.weights.quants",
        "    out[:, :half] = packed & 0x0F\n    out[:, half:] = packed >> 4\n",
        "    out[:, half:] = packed & 0x0F\n    out[:, :half] = packed >> 4\n",
        "tests/parity/test_quants.py::test_random_blocks_decode_to_the_same_bits",
    ),
    Mutation(
        "weights: an even number of signs is odd",
        "engine.backends.custom.weights.iquants",
        "(np.bitwise_count(seven) & np.uint8(1))",
        "(~np.bitwise_count(seven) & np.uint8(1))",
        "tests/parity/test_quants.py::test_random_blocks_decode_to_the_same_bits",
    ),
    Mutation(
        "weights: the minimum of recoded 4-bit groups is left out",
        "engine.backends.custom.weights.grouped",
        "halves(scales * np.float32(lowest))",
        "halves(scales * np.float32(0))",
        "tests/parity/test_quants.py::test_what_kernels_read_has_the_same_values",
    ),
    Mutation(
        "weights: safetensors may leave gaps",
        "engine.backends.custom.weights.safetensors",
        "        if entry.begin != position:\n",
        "        if entry.begin < position:\n",
        "tests/security/test_safetensors_rules.py",
    ),
    Mutation(
        "weights: parameters of a gated feed-forward are counted as two matrices",
        "engine.backends.custom.architectures.base",
        "* (3 if self.gated_mlp else 2)",
        "* 2",
        f"{CONFIG_TESTS}::test_parameters_are_those_of_the_matrices",
    ),
    Mutation(
        "weights: a token's values are not counted",
        "engine.backends.custom.architectures.base",
        "        return 2 * self.num_layers * self.num_kv_heads",
        "        return self.num_layers * self.num_kv_heads",
        f"{CONFIG_TESTS}::test_a_token_takes_a_key_and_a_value_in_every_layer",
    ),
    Mutation(
        "weights: heads need not be whole groups",
        "engine.backends.custom.architectures.base",
        "        and config.num_heads % config.num_kv_heads == 0,\n",
        "        and config.num_heads >= config.num_kv_heads,\n",
        f"{CONFIG_TESTS}::test_the_last_value_that_makes_sense_and_the_first_that_does_not",
    ),
    Mutation(
        "weights: llama3's bounds are swapped",
        "engine.backends.custom.architectures.rope",
        'low_freq_factor=reader.read(float, "low_freq_factor"),',
        'low_freq_factor=reader.read(float, "high_freq_factor"),',
        f"{CONFIG_TESTS}::TestRopeFromHf::test_llama3_numbers",
    ),
    Mutation(
        "weights: yarn's magnitude of GGUF replaces the usual one",
        "engine.backends.custom.architectures.rope",
        "attention_factor=stretch and stretch * yarn_magnitude(factor, 1.0),",
        "attention_factor=stretch,",
        f"{CONFIG_TESTS}::TestRopeFromGguf::test_yarn",
    ),
    Mutation(
        "weights: a config without a word on tied embeddings ties them",
        "engine.backends.custom.architectures.family",
        '    "tie_embeddings": False,\n',
        '    "tie_embeddings": True,\n',
        f"{CONFIG_TESTS}::test_defaults_of_keys_that_old_configs_leave_out",
    ),
    Mutation(
        "weights: key and value heads default to one",
        "engine.backends.custom.architectures.family",
        '    "num_kv_heads": lambda found: found["num_heads"],\n',
        '    "num_kv_heads": lambda found: 1,\n',
        f"{CONFIG_TESTS}::test_defaults_of_keys_that_old_configs_leave_out",
    ),
    Mutation(
        "weights: a converted matrix that makes logits gets four bits",
        "engine.backends.custom.conversion.stored",
        "        wanted = _LOGITS_TYPE\n",
        "        pass\n",
        f"{CONVERT_TESTS}::test_types_are_chosen_row_by_row",
    ),
    Mutation(
        "weights: a converted matrix loses its last rows",
        "engine.backends.custom.conversion.stored",
        "        part = slice(start, min(start + step, rows))\n",
        "        part = slice(start, min(start + step, rows - 1))\n",
        f"{CONVERT_TESTS}::test_hugging_face_through_gguf_and_back_is_the_same",
    ),
]
