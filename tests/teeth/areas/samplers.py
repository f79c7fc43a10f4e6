"""Mistakes in the samplers of llama.cpp, in bad words, allowed tokens and stop patterns."""

from tests.teeth.mutation import MACHINE, Mutation

CHAIN = "engine.runtime.samplers.chain"
REPETITION = "engine.runtime.samplers.repetition"
CHAIN_TESTS = "tests/unit/runtime/samplers/test_chain_sampler.py"
ALONE = f"{CHAIN_TESTS}::test_batched_sampler_chains_equal_the_reference"
LLAMA = f"{CHAIN_TESTS}::test_probabilities_after_each_sampler_equal_llama_cpps"
NATIVE = "tests/parity/models/test_runner_conformance.py::TestNative"
CONFORMS = f"{NATIVE}::test_llama_cpp_sampler_chains_equal_the_reference"

MUTATIONS = [
    Mutation(
        "samplers: Mirostat learns twice from a step that is run again",
        CHAIN,
        "seq.rules.surprise_limits[num_generated:] = [mu]",
        "seq.rules.surprise_limits.append(mu)",
        ALONE,
    ),
    Mutation(
        "samplers: Mirostat forgets what it has learned",
        CHAIN,
        "mu = seq.rules.surprise_limits[num_generated - 1]",
        "pass",
        CONFORMS,
    ),
    Mutation(
        "samplers: XTC drops the last token at its threshold as well",
        CHAIN,
        'kind="stable")[1:]]] = -np.inf',
        'kind="stable")]] = -np.inf',
        LLAMA,
    ),
    Mutation(
        "samplers: XTC draws the same number for each choice",
        CHAIN,
        "row_keys(*_noise_inputs(seq.seed ^ XTC_STREAM, seq.choice, position))",
        "row_keys(*_noise_inputs(seq.seed ^ XTC_STREAM, 0, position))",
        ALONE,
    ),
    Mutation(
        "samplers: typical-p keeps one token too few",
        CHAIN,
        "np.where(distance > limit,",
        "np.where(distance >= limit,",
        LLAMA,
    ),
    Mutation(
        "samplers: the temperature comes first in llama.cpp's order",
        CHAIN,
        "(SAMPLERS if params.has_chain else USUAL_SAMPLERS)",
        "(SAMPLERS[::-1] if params.has_chain else USUAL_SAMPLERS)",
        LLAMA,
    ),
    Mutation(
        "samplers: penalties look at the whole text",
        CHAIN,
        "start = 0 if params.repeat_last_n < 0 else max(len(tokens) - params.repeat_last_n, 0)",
        "start = 0",
        LLAMA,
    ),
    Mutation(
        "samplers: a grammar does not bind the tokens of the host",
        CHAIN,
        "        if sampling.mask is not None:\n",
        "        if False:\n",
        MACHINE,
    ),
    Mutation(
        "samplers: the device forgets a token that the host sampled",
        "engine.runtime.model_runner",
        "        kept[self.host_rows] = True\n",
        "",
        "tests/parity/models/test_runner_conformance.py::TestJAX::test_llama_cpp_sampler_chains_equal_the_reference",
    ),
    Mutation(
        "samplers: a repetition extends over a sequence breaker",
        REPETITION,
        "    longest = _since_breaker(tokens, breakers)\n",
        "    longest = len(tokens)\n",
        LLAMA,
    ),
    Mutation(
        "samplers: a sequence breaker is penalized",
        REPETITION,
        "if token >= 0 and () not in breakers.get(token, ())",
        "if token >= 0",
        LLAMA,
    ),
    Mutation(
        "samplers: a bad word of several tokens is banned by its last alone",
        REPETITION,
        "if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]",
        "]",
        f"{CHAIN_TESTS}::test_a_bad_word_is_banned_only_after_its_own_prefix",
    ),
    Mutation(
        "samplers: a row's allowed tokens are allowed to all rows only",
        REPETITION,
        "    mask[row] &= allowed\n",
        "    mask &= allowed\n",
        MACHINE,
    ),
    Mutation(
        "samplers: a match of a stop pattern is not shown",
        "engine.core.text.stop_strings",
        "return text[: index + 1]",
        "return text[:index]",
        "tests/property/test_detokenizer.py::test_text_is_cut_after_the_first_stop_pattern_match",
    ),
    Mutation(
        "samplers: a sampler that is not named acts",
        "engine.core.interfaces.request",
        "            if name not in self.samplers:\n",
        "            if name not in SAMPLERS:\n",
        "tests/unit/servers/openai/test_server_validation.py::test_sampling_fields_reach_the_sampling_params",
    ),
]
