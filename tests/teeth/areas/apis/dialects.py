"""Mutations of the table of other servers' parameters, and of what they do."""

from tests.teeth.mutation import Mutation

_TESTS = "tests/unit/servers/test_server_dialects.py"
_READING = "engine.servers.schema.dialects.reading"
MUTATIONS = [
    Mutation(
        "a parameter without effect causes no warning",
        _READING,
        "            reading.warn(sent, word.warning)\n",
        "            pass\n",
        f"{_TESTS}::test_every_row_of_the_parameter_table_behaves_as_stated[warned-_is_warned]",
    ),
    Mutation(
        "errors about a converted parameter name the other one",
        _READING,
        "            reading.sent_as[name] = sent\n",
        "            pass\n",
        f"{_TESTS}::test_errors_name_the_parameter_as_the_client_sent_it",
    ),
    Mutation(
        "of two parameters that differ, the first wins",
        _READING,
        "    elif value is not None and value != other:\n",
        "    elif False:\n",
        f"{_TESTS}::test_errors_name_the_parameter_as_the_client_sent_it",
    ),
    Mutation(
        "values that ask for nothing are compared as Python does",
        _READING,
        "type(value) is type(each) and value == each",
        "value == each",
        f"{_TESTS}::test_neutral_values_are_compared_by_type",
    ),
    Mutation(
        "a limit below zero is the default limit",
        "engine.servers.schema.dialects.conversions",
        "NO_LIMIT if type(value) is int and value < 0 else value",
        "None if type(value) is int and value < 0 else value",
        f"{_TESTS}::test_a_negative_max_tokens_means_the_rest_of_the_context",
    ),
    Mutation(
        "cache_prompt false uses the cache",
        "engine.servers.serving.generation",
        "if body.cache_prompt is False:",
        "if False:",
        f"{_TESTS}::test_the_engine_reports_progress_and_can_skip_its_cache",
    ),
    Mutation(
        "progress is told at the end only",
        "engine.runtime.outputs",
        "        if samples or seq not in self._reporting:\n",
        "        if True:\n",
        f"{_TESTS}::test_the_engine_reports_progress_and_can_skip_its_cache",
    ),
    Mutation(
        "timings leave out the prompt",
        "engine.servers.openai.reports",
        "        self._progress = event.progress\n",
        "",
        f"{_TESTS}::test_the_engine_reports_progress_and_can_skip_its_cache",
    ),
    Mutation(
        "only the first token of a text is biased",
        "engine.frontend.prompts",
        "dict.fromkeys(text.tokenizer.encode(each), bias)",
        "dict.fromkeys(text.tokenizer.encode(each)[:1], bias)",
        f"{_TESTS}::test_logit_bias_can_name_texts",
    ),
]
