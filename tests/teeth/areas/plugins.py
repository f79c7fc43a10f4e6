"""Mutations of the plugin host."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "plugins: a filtered call has no name",
        "engine.plugins.filtering",
        'index, "", event.call_id, event.name)',
        'index, "")',
        "tests/unit/library/test_plugins.py::test_redacted_tool_arguments_stay_json_and_reasoning_precedes_text",
    ),
    Mutation(
        "plugins: names within arguments are shown",
        "engine.plugins.filtering",
        "return {change(key): _mapped(each, change)",
        "return {key: _mapped(each, change)",
        "tests/unit/library/test_plugins.py::test_pii_in_argument_names_is_redacted",
    ),
    Mutation(
        "plugins: vectors are made unseen",
        "engine.plugins.backend",
        "                if host.observes:\n                    host.observe",
        "                if False:\n                    host.observe",
        "tests/unit/library/test_plugins.py::test_an_observing_plugin_sees_embeddings_and_their_failures",
    ),
    Mutation(
        "plugins: texts to be embedded are not prepared",
        "engine.plugins.backend",
        "            view = await prepared(self.hosts, view)\n            changed",
        "            changed",
        "tests/unit/library/test_plugins.py::test_prompts_are_redacted_in_every_text_field",
    ),
    Mutation(
        "plugins: each hook may fail three times",
        "engine.plugins.host",
        "if self._in_a_row.total() >= MAX_FAILURES",
        "if self._in_a_row[hook] >= MAX_FAILURES",
        "tests/security/processes/test_misbehaving_plugins.py::test_failures_of_several_plugin_hooks_add_up",
    ),
    Mutation(
        "plugins: personal data after a gap is not redacted",
        "engine.plugins.pii",
        "suffix=self._value(request.suffix),",
        "suffix=request.suffix,",
        "tests/unit/library/test_plugins.py::test_prompts_are_redacted_in_every_text_field",
    ),
]
