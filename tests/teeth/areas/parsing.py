"""Mutations of the parsers of tool calls."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "calls: a call that failed hides the text behind it",
        "engine.core.parsing.calls",
        "        if self.num_calls and self._source.is_over:",
        "        if self.num_calls:",
        "tests/unit/core/parsing/test_parsing.py::test_a_malformed_call_does_not_hide_the_next_one",
    ),
    Mutation(
        "calls: tools that nobody offered are called",
        "engine.core.parsing.calls",
        "            if name not in self.names:\n"
        "                raise NotACall\n"
        "            call.name",
        "            call.name",
        "tests/unit/core/parsing/test_parsing.py::test_malformed_calls_are_returned_as_text",
    ),
    Mutation(
        "calls: arguments come with the space around them",
        "engine.core.parsing.calls",
        "self.add(arguments.strip())",
        "self.add(arguments)",
        "tests/unit/core/parsing/test_parsing.py"
        "::test_arguments_before_the_name_are_stripped_of_whitespace",
    ),
    Mutation(
        "calls: the last name counts",
        "engine.core.parsing.calls",
        "key in NAME_KEYS and call.name is None",
        "key in NAME_KEYS",
        "tests/unit/core/parsing/test_parsing.py::test_the_first_of_several_name_keys_names_the_call",
    ),
    Mutation(
        "markers: one cut before its last character is text",
        "engine.core.parsing.source",
        "longest = min(max(map(len, markers), default=1) - 1, self.num_unread)",
        "longest = min(max(map(len, markers), default=1) - 2, self.num_unread)",
        "tests/unit/core/parsing/test_parsing.py::test_calls_are_the_same_for_every_split_of_the_text",
    ),
    Mutation(
        "names have no bound",
        "engine.core.parsing.source",
        "            left -= num_before - self.num_unread\n",
        "",
        "tests/unit/core/parsing/test_parsing.py::test_a_word_is_read_up_to_its_length_limit",
    ),
    Mutation(
        "JSON: an escape of three digits is one",
        "engine.core.parsing.json_scanner",
        "len(self._escape) == 6",
        "len(self._escape) == 5",
        "tests/unit/core/parsing/test_parsing.py::test_the_json_scanner_works_for_every_split",
    ),
    Mutation(
        "JSON: a comma may be the last",
        "engine.core.parsing.json_scanner",
        'self._expects = "next_key" if',
        'self._expects = "key" if',
        "tests/unit/core/parsing/test_parsing.py::test_the_json_scanner_works_for_every_split",
    ),
    Mutation(
        "calls: a fence that nobody opened is swallowed",
        "engine.core.parsing.row_reader",
        "    if is_fenced and (yield",
        "    if (yield",
        "tests/unit/core/parsing/test_parsing.py::test_a_closing_code_fence_without_an_opening_one_is_text",
    ),
    Mutation(
        "messages: what was said is said before every call",
        "engine.core.parsing.output",
        'content = message["content"] if number == 0 else ""',
        'content = message["content"]',
        "tests/unit/core/parsing/test_parsing_messages.py::test_llama_gets_one_call_per_message",
    ),
    Mutation(
        "rows: a string of an element is streamed with the line end behind it",
        "engine.core.parsing.values",
        'pending = "\\n" if self._is_padded and chunk.endswith("\\n") else ""',
        'pending = ""',
        "tests/unit/core/parsing/test_parsing_rows.py"
        "::test_example_calls_of_every_format_are_parsed_for_every_split[qwen_xml]",
    ),
    Mutation(
        "rows: a value of an element is JSON whatever the schema says",
        "engine.core.parsing.values",
        'if is_text if is_text is not None else types == {"string"}:',
        "if is_text:",
        "tests/unit/core/parsing/test_parsing_rows.py::test_string_arguments_are_streamed_before_their_element_ends",
    ),
    Mutation(
        "fences: a call is read although text follows",
        "engine.core.parsing.row_reader",
        "                if not isinstance(piece, ToolCallPiece):\n"
        "                    self._source.unread(len(FENCE))\n"
        "                    return\n",
        "                if not isinstance(piece, ToolCallPiece):\n                    continue\n",
        "tests/unit/core/parsing/test_parsing_rows.py::test_a_call_in_a_code_fence_is_read_if_nothing_follows",
    ),
    Mutation(
        "templates: the tool template is used without tools",
        "engine.frontend.prompts",
        "    chat = text.tool_chat if tools else text.chat\n",
        "    chat = text.tool_chat\n",
        "tests/unit/frontend/test_chat_formats.py::test_the_tool_use_template_is_used_if_there_are_tools",
    ),
    Mutation(
        "grammar: a call may leave out a required argument",
        "engine.core.parsing.call_grammars",
        'rules.append(name if key in required else f"{name}?")',
        'rules.append(f"{name}?")',
        "tests/unit/core/parsing/test_parsing_row_grammars.py::test_tool_choice_required_forces_the_formats_own_syntax",
    ),
]
