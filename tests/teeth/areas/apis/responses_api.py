"""Mutations of /v1/responses and its storage."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "responses: the prompt's tokens are told as the answer's",
        "engine.servers.responses.format",
        '"output_tokens": usage.completion_tokens,',
        '"output_tokens": usage.prompt_tokens,',
        "tests/unit/servers/responses/test_server_responses.py::test_a_response_body_has_openais_shape",
    ),
    Mutation(
        "responses: what was cut off is complete",
        "engine.servers.responses.output",
        'is_complete=event.reason != "length"',
        "is_complete=True",
        "tests/unit/servers/responses/test_server_responses.py::test_a_truncated_response_is_incomplete",
    ),
    Mutation(
        "responses: two calls are one",
        "engine.servers.responses.output",
        "(current.kind, current.key) != (kind, key)",
        "current.kind != kind",
        "tests/unit/servers/responses/test_server_responses.py::test_a_response_has_text_before_function_calls",
    ),
    Mutation(
        "responses: references are nobody's",
        "engine.servers.responses.create",
        "turns = await self._store.turns(wanted, owner)",
        'turns = await self._store.turns(wanted, "")',
        "tests/unit/servers/access/test_server_tenants.py::test_item_references_resolve_only_within_the_tenant",
    ),
    Mutation(
        "responses: what could not be stored says that it is",
        "engine.servers.responses.create",
        'response = response | {"store": False}',
        "pass",
        "tests/unit/servers/responses/test_server_responses_store.py::test_a_disk_that_fills_up_during_the_answer_fails_the_response",
    ),
    Mutation(
        "responses: anybody reads anybody's",
        "engine.servers.storage.objects",
        "FROM responses WHERE id = ? AND owner = ? AND",
        "FROM responses WHERE id = ? AND ? IS NOT NULL AND",
        "tests/tables/routes/test_routes.py::test_objects_of_another_tenant_look_like_missing_objects",
    ),
    Mutation(
        "background: a response ends with its client",
        "engine.servers.responses.create",
        "is_awaited = not body.background",
        "is_awaited = True",
        "tests/unit/servers/responses/test_server_background.py::test_a_background_response_is_polled_and_continued",
    ),
    Mutation(
        "background: a stream begins again",
        "engine.servers.responses.format",
        '        if number <= self._after:\n            return b""\n',
        "",
        "tests/unit/servers/responses/test_server_background.py::test_a_background_stream_resumes_after_a_sequence_number",
    ),
    Mutation(
        "background: a slow reader's events are merged",
        "engine.servers.serving.sse",
        "is_slow = self._merges and pump.has_pending",
        "is_slow = pump.has_pending",
        "tests/unit/servers/responses/test_server_background.py::test_a_slow_reader_gets_every_event_separately",
    ),
    Mutation(
        "background: anybody cancels anybody's",
        "engine.servers.responses.background",
        "job is not None and job.owner == owner",
        "job is not None",
        "tests/unit/servers/responses/test_server_background.py::test_a_background_response_is_visible_only_to_its_owner",
    ),
    Mutation(
        "background: a dead server's response is queued for ever",
        "engine.servers.responses.background",
        "        if not lock.acquire():\n            return False\n",
        "        return False\n",
        "tests/unit/servers/responses/test_server_background.py::test_a_background_response_of_a_killed_server_has_failed",
    ),
    Mutation(
        "background: a response that is being made is continued",
        "engine.servers.responses.store",
        "    if made.status in UNFINISHED:\n",
        "    if False:\n",
        "tests/unit/servers/responses/test_server_background.py::test_a_background_response_is_polled_and_continued",
    ),
    Mutation(
        "compaction: a summary replaces the instructions",
        "engine.servers.responses.messages",
        'first | {"content": f"{first[\'content\']}\\n\\n{summary}"}',
        'first | {"content": summary}',
        "tests/unit/servers/responses/test_server_responses_sdk.py::test_a_conversation_is_compacted_and_goes_on",
    ),
    Mutation(
        "compaction: a question is followed by another user message",
        "engine.servers.responses.compact",
        'if last["role"] != "user":',
        "if True:",
        "tests/unit/servers/responses/test_server_responses_sdk.py::test_the_last_question_is_compacted_with_the_rest",
    ),
    Mutation(
        "conversations: an answer is not added",
        "engine.servers.responses.create",
        'new = items + response["output"]',
        "new = items",
        "tests/unit/servers/responses/test_server_conversations.py"
        "::test_a_response_continues_and_extends_a_conversation",
    ),
    Mutation(
        "conversations: one that was read last is deleted first",
        "engine.servers.storage.objects",
        'num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, object_id)\n        )\n'
        "        self.keep(db, [object_id])\n",
        'num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, object_id)\n        )\n',
        "tests/unit/servers/responses/test_server_conversations.py"
        "::test_conversations_are_private_survive_a_restart_and_are_bounded",
    ),
    Mutation(
        "conversations: an item is added again",
        "engine.servers.responses.create",
        "            _check_new(body.input, earlier)\n",
        "",
        "tests/unit/servers/responses/test_server_conversations.py::test_an_item_is_added_to_a_conversation_once",
    ),
    Mutation(
        "responses: a page begins with the last one's end",
        "engine.servers.http.listing",
        "items[ids.index(after) + 1 :]",
        "items[ids.index(after) :]",
        "tests/unit/servers/responses/test_server_responses_store.py::test_input_items_are_listed_in_pages",
    ),
    Mutation(
        "responses: only the last turn is kept longer",
        "engine.servers.responses.create",
        "[turn.id for turn in turns]",
        "[turn.id for turn in turns[-1:]]",
        "tests/unit/servers/responses/test_server_responses_store.py::test_earlier_responses_live_as_long_as_the_last_of_their_conversation",
    ),
    Mutation(
        "responses: tools that can't run are refused",
        "engine.servers.responses.tools",
        '*("tool_search", "web_search",',
        '*("tool_search",',
        "tests/unit/servers/responses/test_server_responses_requests.py::test_unsupported_tool_types_are_dropped",
    ),
]
