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
        "tests/unit/backends/test_openai_parsing.py::test_text_reasoning_in_both_spellings_and_usage",
    ),
    Mutation(
        "streams: what broke off is complete",
        "engine.backends.openai.reader",
        "        if self._num_open:\n            raise unavailable",
        "        if False:\n            raise unavailable",
        "tests/unit/backends/test_openai_backend.py::test_answers_that_break_off",
    ),
    Mutation(
        "streams: held text is lost at the end",
        "engine.backends.openai.reader",
        "if choice.stops is not None and (held := choice.stops.flush()):",
        "if False and (held := choice.stops.flush()):",
        "tests/unit/backends/test_openai_parsing.py"
        "::test_stop_strings_that_the_server_is_not_told_of_are_found_here",
    ),
    Mutation(
        "streams: a choice that nobody asked for ends it",
        "engine.backends.openai.reader",
        "            if 0 <= choice.index < len(self._choices):",
        "            if True:",
        "tests/unit/backends/test_openai_parsing.py::test_a_choice_that_nobody_asked_for_is_passed_over",
    ),
    Mutation(
        "streams: some ids stand for all tokens",
        "engine.backends.openai.reader",
        "return ids if len(ids) == len(tokens) else []",
        "return ids",
        "tests/unit/backends/test_openai_parsing.py::test_ids_are_those_of_all_tokens_or_of_none",
    ),
    Mutation(
        "requests: the largest seed becomes 0",
        "engine.backends.openai.requests",
        "params.seed % (dialect.max_seed + 1)",
        "params.seed % dialect.max_seed",
        "tests/unit/backends/test_openai_requests.py::test_the_names_that_dialects_use",
    ),
    Mutation(
        "requests: salts are sent as they are",
        "engine.backends.openai.requests",
        "hashlib.sha256(salt.encode()).hexdigest()",
        "salt",
        "tests/unit/backends/test_openai_requests.py::test_tenants_stay_apart_where_the_server_can",
    ),
    Mutation(
        "requests: the urgent come last",
        "engine.backends.openai.requests",
        '            body["priority"] = priority\n',
        '            body["priority"] = -priority\n',
        "tests/unit/backends/test_openai_requests.py::test_the_names_that_dialects_use",
    ),
    Mutation(
        "errors: a forbidden key is the client's",
        "engine.backends.openai.failures",
        "    if status in (401, 403):",
        "    if status == 401:",
        "tests/unit/backends/test_openai_parsing.py::test_our_own_key_is_not_the_clients_trouble",
    ),
    Mutation(
        "errors: milliseconds are not read",
        "engine.backends.openai.failures",
        '(b"retry-after-ms", 1e-3), (b"retry-after", 1.0)',
        '(b"retry-after", 1.0),',
        "tests/unit/backends/test_openai_parsing.py::test_when_to_come_back",
    ),
    Mutation(
        "errors: a grammar has a name that the client never wrote",
        "engine.backends.openai.failures",
        "        param = grammar_param\n    code",
        "    code",
        "tests/unit/backends/test_openai_parsing.py"
        "::test_a_grammar_is_complained_of_under_the_clients_name_for_it",
    ),
    Mutation(
        "restarts: every pause is the same",
        "engine.backends.process",
        "2 ** (len(self._deaths) - 1)",
        "2",
        "tests/unit/backends/test_supervisor.py::test_pauses_double_until_it_dies_too_often",
    ),
    Mutation(
        "supervisor: silences add up",
        "engine.backends.external.supervisor",
        "                answered_at = time.monotonic()\n            elif",
        "                pass\n            elif",
        "tests/unit/backends/test_supervisor.py::test_one_that_answers_between_its_silences_is_left_alone",
    ),
    Mutation(
        "supervisor: restarts are not counted",
        "engine.backends.external.supervisor",
        "            self.num_restarts += 1\n",
        "",
        "tests/unit/backends/test_supervisor.py::test_a_death_is_followed_by_another_start",
    ),
    Mutation(
        "launcher: a second SIGTERM gives more time",
        "engine.backends.external.launcher",
        "self._deadline = min(deadline, self._deadline or deadline)",
        "self._deadline = deadline",
        "tests/unit/backends/test_reaping.py::test_who_is_asked_to_end_twice_gets_no_more_time",
    ),
    Mutation(
        "launcher: a tracker that does not end is waited for",
        "engine.backends.external.launcher",
        "is_spared = time.monotonic() < deadline and TRACKER in",
        "is_spared = TRACKER in",
        "tests/unit/backends/test_reaping.py::test_a_tracker_gets_its_time_and_is_then_killed_too",
    ),
    Mutation(
        "launcher: a tracker is killed at once",
        "engine.backends.external.launcher",
        "is_spared = time.monotonic() < deadline and TRACKER in",
        "is_spared = False and TRACKER in",
        "tests/unit/backends/test_reaping.py::test_a_tracker_gets_its_time_and_is_then_killed_too",
    ),
]
