"""Mistakes in corners of several rooms that a common request does not reach."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "corners: waiting requests do not keep a wrapped model loaded",
        "engine.routing.on_demand",
        "stats.num_running + stats.num_waiting > 0",
        "stats.num_running > 0",
        "tests/unit/test_on_demand.py::test_requests_from_before_it_was_wrapped_keep_a_model_busy",
    ),
    Mutation(
        "corners: a plugin that was enabled again keeps its failures",
        "engine.plugins.host",
        "        self._in_a_row.clear()\n",
        "        pass\n",
        "tests/security/test_misbehaving_plugins.py"
        "::test_nothing_passes_a_plugin_that_keeps_things_back",
    ),
    Mutation(
        "corners: a changed answer loses its stop string",
        "engine.plugins.answer",
        '"tool_calls" if has_calls else "stop", ended.stop_reason)',
        '"tool_calls" if has_calls else "stop")',
        "tests/unit/test_plugins.py::test_a_changed_answer_keeps_the_stop_string_that_ended_it",
    ),
    Mutation(
        "corners: a dash at the end of a GBNF class is a range",
        "engine.core.grammar.gbnf",
        'if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":',
        'if self._peek() == "-":',
        "tests/unit/test_grammar_spec.py::test_gbnf_forms",
    ),
    Mutation(
        "corners: a merged end loses its stop token",
        "engine.backends.custom.frontend.generation",
        "        stop_token_id=second.stop_token_id,\n",
        "        stop_token_id=first.stop_token_id,\n",
        "tests/unit/test_generation.py::test_a_merged_backlog_keeps_the_stop_token_of_its_end",
    ),
    Mutation(
        "corners: large negative values fit float16",
        "engine.backends.custom.weights.quantize",
        "if np.abs(blocks).max(initial=0) > _HALF_MAX:",
        "if blocks.max(initial=0) > _HALF_MAX:",
        "tests/parity/test_quants.py::test_what_cannot_be_encoded_is_refused",
    ),
    Mutation(
        "corners: the last learned position can't be used",
        "engine.backends.custom.frameworks.refusals",
        "config.max_seq_len > model.max_position",
        "config.max_seq_len >= model.max_position",
        "tests/unit/test_framework_parts.py"
        "::test_learned_positions_are_a_limit_and_may_all_be_used",
    ),
    Mutation(
        "corners: a server may ask to come back in months",
        "engine.backends.openai.failures",
        "if 0.0 <= seconds <= MAX_RETRY_S:",
        "if 0.0 <= seconds:",
        "tests/unit/test_openai_parsing.py::test_when_to_come_back",
    ),
    Mutation(
        "corners: a new key's limits are mixed up",
        "engine.cli.ops.keys",
        '"max_queued": max_queued,',
        '"max_queued": max_concurrent,',
        "tests/security/test_keys.py::test_every_limit_of_a_new_key_is_its_own",
    ),
    Mutation(
        "conformance: all spaces of a data line are dropped",
        "engine.conformance.sse",
        'value = value.removeprefix(" ")',
        "value = value.strip()",
        "tests/unit/test_conformance.py::test_reading_events",
    ),
    Mutation(
        "conformance: an empty data line is fine",
        "engine.conformance.sse",
        '                problems.append("an empty data line")\n',
        "                pass\n",
        "tests/unit/test_conformance.py::test_reading_events",
    ),
]
