"""Mutations of files, batches and their listings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "lists: a full last page has more",
        "engine.servers.http.listing",
        '"has_more": len(items) > limit',
        '"has_more": len(items) >= limit',
        "tests/unit/servers/openai/test_openai_format.py::test_has_more_is_false_on_the_last_page",
    ),
    Mutation(
        "batches: a page begins with the last one's end",
        "engine.servers.storage.tables",
        '(">", "ASC") if is_rising else ("<", "DESC")',
        '(">", "ASC") if is_rising else ("<=", "DESC")',
        "tests/unit/servers/batches/test_server_batches.py::test_batches_are_listed_in_pages_and_unknown_ones_are_404",
    ),
    Mutation(
        "batches: anybody reads anybody's",
        "engine.servers.storage.tables",
        "owner = COALESCE(?, owner)",
        "owner = COALESCE(owner, ?)",
        "tests/tables/routes/test_routes.py::test_objects_of_another_tenant_look_like_missing_objects",
    ),
    Mutation(
        "message batches: a page before a batch begins with the newest",
        "engine.servers.storage.tables",
        'is_rising = (order == "asc") == (before is None)',
        'is_rising = order == "asc"',
        "tests/unit/servers/batches/test_server_message_batches.py::test_message_batches_are_listed_in_pages_both_ways",
    ),
    Mutation(
        "message batches: the input stays among its owner's files",
        "engine.servers.batches.store",
        'f"{new.id}.jsonl", new.created_at, begin',
        'f"{new.id}.jsonl", new.expires_at, begin',
        "tests/unit/servers/batches/test_server_message_batches.py"
        "::test_the_input_of_a_message_batch_is_not_listed_as_a_file",
    ),
    Mutation(
        "message batches: what was cancelled is an error",
        "engine.servers.batches.results",
        '{"type": "canceled" if status == "cancelled" else status}',
        '{"type": "errored"}',
        "tests/unit/servers/batches/test_server_message_batches.py"
        "::test_a_cancelled_message_batch_lists_its_unanswered_requests",
    ),
    Mutation(
        "batches: cached tokens are not summed",
        "engine.servers.batches.results",
        "cached_tokens=read.cached_tokens or 0,",
        "cached_tokens=0,",
        "tests/unit/servers/openai/test_openai_format.py::test_the_usage_of_a_batch_line_is_read_in_either_apis_names",
    ),
    Mutation(
        "batches: tokens of responses are not summed",
        "engine.servers.batches.results",
        "counts.completion_tokens or counts.output_tokens",
        "counts.completion_tokens",
        "tests/unit/servers/openai/test_openai_format.py::test_the_usage_of_a_batch_line_is_read_in_either_apis_names",
    ),
    Mutation(
        "batches: tokens of reasoning are not summed",
        "engine.servers.batches.results",
        "written.reasoning_tokens or 0",
        "0",
        "tests/unit/servers/openai/test_openai_format.py::test_the_usage_of_a_batch_line_is_read_in_either_apis_names",
    ),
    Mutation(
        "batches: lines come before people",
        "engine.servers.serving.generation",
        "return OFFLINE_PRIORITY if is_acting(request.scope) else 0",
        "return 0",
        "tests/unit/servers/batches/test_server_batches.py::test_every_line_is_answered_in_order",
    ),
    Mutation(
        "batches: a line is refused for lack of room",
        "engine.servers.batches.run",
        "answer.status not in (429, 503, ABANDONED)",
        "answer.status not in (503, ABANDONED)",
        "tests/unit/servers/batches/test_server_batches.py::test_a_batch_line_refused_with_429_or_503_is_retried",
    ),
    Mutation(
        "files: room for uploads is never given back",
        "engine.servers.files.store",
        "                self.num_arriving[owner] -= draft.num_bytes\n",
        "                pass\n",
        "tests/unit/servers/files/test_server_files.py::test_a_full_storage_refuses_uploads_and_keeps_nothing",
    ),
    Mutation(
        "files: the newest are never first",
        "engine.servers.storage.tables",
        '(">", "ASC") if is_rising else ("<", "DESC")',
        '(">", "ASC")',
        "tests/unit/servers/files/test_server_files.py::test_files_are_listed_in_pages",
    ),
    Mutation(
        "files: one that a batch reads is deleted",
        "engine.servers.files.store",
        '"id = ? AND num_holds = 0"',
        '"id = ?"',
        "tests/unit/servers/storage/test_database.py::test_a_file_in_use_by_a_batch_cannot_be_deleted",
    ),
    Mutation(
        "files: uploads at once may fill the disk",
        "engine.servers.files.store",
        "self._store.check_room(self._owner, Used(num_own, num_all), len(data))",
        "self._store.check_room(self._owner, self._used, len(data))",
        "tests/unit/servers/storage/test_database.py::test_concurrent_uploads_share_the_storage_limit",
    ),
    Mutation(
        "uploads: anybody ends anybody's",
        "engine.servers.files.uploads",
        "UPLOADS.find(db, upload_id, owner)",
        "UPLOADS.find(db, upload_id)",
        "tests/tables/routes/test_routes.py::test_objects_of_another_tenant_look_like_missing_objects",
    ),
    Mutation(
        "uploads: a part is left in the storage for ever",
        "engine.servers.files.store",
        "(is_ready OR purpose = ?) AND expires_at <= ?",
        "(is_ready AND purpose <> ?) AND expires_at <= ?",
        "tests/unit/servers/files/test_server_uploads.py::test_an_upload_survives_a_restart_and_expires",
    ),
    Mutation(
        "uploads: the digest is not compared",
        "engine.servers.files.uploads",
        "md5 is not None and md5.lower() != digest.hexdigest()",
        "False",
        "tests/unit/servers/files/test_server_uploads.py::test_a_failed_completion_leaves_the_upload_pending",
    ),
    Mutation(
        "uploads: the final file counts beside its parts",
        "engine.servers.files.uploads",
        "self._files.upload(upload.owner, num_freed=num_bytes)",
        "self._files.upload(upload.owner)",
        "tests/unit/servers/files/test_server_uploads.py::test_parts_count_once_towards_the_storage_limit",
    ),
    Mutation(
        "batches: a batch that is cancelled while it waits keeps a slot",
        "engine.servers.batches.run",
        "        if watching.done() and taking.done():\n"
        "            self._bench.slots.release(owner)\n",
        "",
        "tests/unit/servers/batches/test_server_batches_resume.py::test_a_stopping_batch_takes_no_slot",
    ),
]
