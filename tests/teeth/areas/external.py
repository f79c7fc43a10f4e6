"""Mutations of the client for remote servers: requests, streams, errors, supervised child
processes.
"""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "streams: cached tokens are lost",
        "engine.backends.openai.reader",
        "cached_tokens=0 if cached is None else cached.cached_tokens or 0",
        "cached_tokens=0",
        "tests/unit/backends/test_openai_parsing.py::test_reasoning_is_read_in_both_spellings_with_usage",
    ),
    Mutation(
        "streams: what broke off is complete",
        "engine.backends.openai.reader",
        "        if self._num_open:\n            raise unavailable",
        "        if False:\n            raise unavailable",
        "tests/unit/backends/test_openai_backend.py::test_truncated_streams_are_retryable_errors",
    ),
    Mutation(
        "streams: held text is lost at the end",
        "engine.backends.openai.reader",
        "if choice.stops is not None and (held := choice.stops.flush()):",
        "if False and (held := choice.stops.flush()):",
        "tests/unit/backends/test_openai_parsing.py"
        "::test_stop_strings_beyond_the_servers_limit_are_matched_locally",
    ),
    Mutation(
        "streams: a choice that nobody asked for ends it",
        "engine.backends.openai.reader",
        "            if 0 <= choice.index < len(self._choices):",
        "            if True:",
        "tests/unit/backends/test_openai_parsing.py::test_choices_with_unexpected_indexes_are_ignored",
    ),
    Mutation(
        "streams: some ids stand for all tokens",
        "engine.backends.openai.reader",
        "return ids if len(ids) == len(tokens) else []",
        "return ids",
        "tests/unit/backends/test_openai_parsing.py::test_token_ids_are_reported_only_if_every_token_has_one",
    ),
    Mutation(
        "requests: the largest seed becomes 0",
        "engine.backends.openai.requests",
        "params.seed % (dialect.max_seed + 1)",
        "params.seed % dialect.max_seed",
        "tests/unit/backends/test_openai_requests.py::test_parameters_are_sent_under_each_dialects_names",
    ),
    Mutation(
        "requests: salts are sent as they are",
        "engine.backends.openai.requests",
        "hashlib.sha256(salt.encode()).hexdigest()",
        "salt",
        "tests/unit/backends/test_openai_requests.py::test_tenants_get_separate_cache_salts_where_the_dialect_can",
    ),
    Mutation(
        "requests: the urgent come last",
        "engine.backends.openai.requests",
        '            body["priority"] = priority\n',
        '            body["priority"] = -priority\n',
        "tests/unit/backends/test_openai_requests.py::test_parameters_are_sent_under_each_dialects_names",
    ),
    Mutation(
        "errors: a forbidden key is the client's",
        "engine.backends.openai.failures",
        "    if status in (401, 403):",
        "    if status == 401:",
        "tests/unit/backends/test_openai_parsing.py::test_an_upstream_401_does_not_leak_the_key",
    ),
    Mutation(
        "errors: milliseconds are not read",
        "engine.backends.openai.failures",
        '(b"retry-after-ms", 1e-3), (b"retry-after", 1.0)',
        '(b"retry-after", 1.0),',
        "tests/unit/backends/test_openai_parsing.py::test_retry_after_headers_are_read",
    ),
    Mutation(
        "errors: a grammar has a name that the client never wrote",
        "engine.backends.openai.failures",
        "        param = grammar_param\n    code",
        "    code",
        "tests/unit/backends/test_openai_parsing.py"
        "::test_upstream_grammar_errors_name_the_clients_parameter",
    ),
    Mutation(
        "restarts: every pause is the same",
        "engine.ipc.child_process",
        "2 ** (len(self._deaths) - 1)",
        "2",
        "tests/unit/backends/test_supervisor.py::test_restart_delays_double_until_too_many_deaths",
    ),
    Mutation(
        "supervisor: silences add up",
        "engine.backends.external.supervisor",
        "                answered_at = time.monotonic()\n            elif",
        "                pass\n            elif",
        "tests/unit/backends/test_supervisor.py::test_a_child_that_answers_between_silent_probes_is_not_restarted",
    ),
    Mutation(
        "supervisor: restarts are not counted",
        "engine.backends.external.supervisor",
        "            self.num_restarts += 1\n",
        "",
        "tests/unit/backends/test_supervisor.py::test_a_child_that_dies_is_restarted",
    ),
    Mutation(
        "launcher: a second SIGTERM gives more time",
        "engine.backends.external.launcher",
        "self._deadline = min(deadline, self._deadline or deadline)",
        "self._deadline = deadline",
        "tests/unit/backends/test_reaping.py::test_asking_a_child_twice_to_stop_does_not_extend_its_deadline",
    ),
    Mutation(
        "launcher: a tracker that does not end is waited for",
        "engine.backends.external.launcher",
        "is_spared = time.monotonic() < deadline and TRACKER in",
        "is_spared = TRACKER in",
        "tests/unit/backends/test_reaping.py::test_a_resource_tracker_gets_time_to_clean_up_and_is_then_killed",
    ),
    Mutation(
        "launcher: a tracker is killed at once",
        "engine.backends.external.launcher",
        "is_spared = time.monotonic() < deadline and TRACKER in",
        "is_spared = False and TRACKER in",
        "tests/unit/backends/test_reaping.py::test_a_resource_tracker_gets_time_to_clean_up_and_is_then_killed",
    ),
]
