"""Mutations of the parsers of tool calls."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "calls: a call that failed hides the text behind it",
        "engine.core.parsing.calls",
        "        if self.num_calls and self._source.is_over:",
        "        if self.num_calls:",
        "tests/unit/test_parsing.py::test_a_failed_call_does_not_hide_the_next",
    ),
    Mutation(
        "calls: tools that nobody offered are called",
        "engine.core.parsing.calls",
        "            if name not in self.names:\n"
        "                raise NotACall\n"
        "            call.name",
        "            call.name",
        "tests/unit/test_parsing.py::test_what_is_no_call_is_given_out_again",
    ),
    Mutation(
        "calls: arguments come with the space around them",
        "engine.core.parsing.calls",
        "self.add(arguments.strip())",
        "self.add(arguments)",
        "tests/unit/test_parsing.py"
        "::test_arguments_before_the_name_come_without_the_space_around_them",
    ),
    Mutation(
        "calls: the last name counts",
        "engine.core.parsing.calls",
        "key in NAME_KEYS and call.name is None",
        "key in NAME_KEYS",
        "tests/unit/test_parsing.py::test_the_first_name_is_the_calls",
    ),
    Mutation(
        "markers: one cut before its last character is text",
        "engine.core.parsing.source",
        "longest = min(max(map(len, markers), default=1) - 1, self.num_unread)",
        "longest = min(max(map(len, markers), default=1) - 2, self.num_unread)",
        "tests/unit/test_parsing.py::test_calls_cut_in_two_anywhere_are_the_same_calls",
    ),
    Mutation(
        "names have no bound",
        "engine.core.parsing.source",
        "            left -= num_before - self.num_unread\n",
        "",
        "tests/unit/test_parsing.py::test_no_more_of_a_name_is_read_than_it_may_have",
    ),
    Mutation(
        "JSON: an escape of three digits is one",
        "engine.core.parsing.json_scanner",
        "len(self._escape) == 6",
        "len(self._escape) == 5",
        "tests/unit/test_parsing.py::test_json_is_known_wherever_it_is_cut",
    ),
    Mutation(
        "JSON: a comma may be the last",
        "engine.core.parsing.json_scanner",
        'self._expects = "next_key" if',
        'self._expects = "key" if',
        "tests/unit/test_parsing.py::test_json_is_known_wherever_it_is_cut",
    ),
    Mutation(
        "calls: a fence that nobody opened is swallowed",
        "engine.core.parsing.row_reader",
        "    if is_fenced and (yield",
        "    if (yield",
        "tests/unit/test_parsing.py::test_a_fence_that_was_not_opened_is_text",
    ),
    Mutation(
        "messages: what was said is said before every call",
        "engine.core.parsing.messages",
        'content = message["content"] if number == 0 else ""',
        'content = message["content"]',
        "tests/unit/test_parsing_messages.py::test_llama_gets_one_call_per_message",
    ),
]
