"""Mutations of /v1/messages."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "messages: cached tokens are counted twice",
        "engine.servers.anthropic.format",
        "usage.prompt_tokens - usage.cached_tokens",
        "usage.prompt_tokens",
        "tests/unit/servers/test_server_anthropic.py::test_usage_parts_add_up_to_the_prompt",
    ),
    Mutation(
        "messages: the stop sequence is not told",
        "engine.servers.anthropic.format",
        '{"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}',
        '{"stop_reason": "stop_sequence", "stop_sequence": None}',
        "tests/unit/servers/test_server_anthropic.py::test_stop_reasons_are_translated",
    ),
    Mutation(
        "messages: text behind a call hides it",
        "engine.servers.anthropic.format",
        'self._has_calls or piece.kind == "tool_use"',
        'piece.kind == "tool_use"',
        "tests/unit/servers/test_server_anthropic.py::test_stop_reasons_are_translated",
    ),
    Mutation(
        "messages: calls of one turn replace each other",
        "engine.servers.anthropic.blocks",
        'turn.get("tool_calls", []) + more["tool_calls"]',
        'more["tool_calls"]',
        "tests/unit/servers/test_server_anthropic_fields.py::test_consecutive_messages_of_one_role_are_merged",
    ),
    Mutation(
        "messages: a stream starts with no input tokens",
        "engine.servers.anthropic.format",
        "prompt_tokens=self._num_prompt",
        "prompt_tokens=0",
        "tests/unit/servers/openai/test_server_prompt_lengths.py::test_a_messages_stream_starts_with_its_input_tokens",
    ),
]
