"""Mistakes between a frontend and its engine: the link, frames, the pulse, clients, the worker."""

from tests.teeth.mutation import Mutation

LINK_TESTS = "tests/unit/test_link_states.py"
FRAME_TESTS = "tests/unit/test_engine_frames.py"
OPTION_TESTS = "tests/unit/test_engine_options.py"

MUTATIONS = [
    Mutation(
        "ipc: a request that was not sent is waited for",
        "engine.backends.custom.frontend.engine_link",
        "        self._client.send(request)\n"
        "        self._receivers[request.request_id] = receiver\n",
        "        self._receivers[request.request_id] = receiver\n"
        "        self._client.send(request)\n",
        f"{LINK_TESTS}::test_a_request_that_could_not_be_sent_is_not_waited_for",
    ),
    Mutation(
        "ipc: forgetting one choice forgets the request",
        "engine.backends.custom.frontend.engine_link",
        "        if choice is None:\n            self._receivers.pop(request_id, None)\n",
        "        self._receivers.pop(request_id, None)\n",
        f"{LINK_TESTS}::test_forgetting_a_choice_keeps_the_others",
    ),
    Mutation(
        "ipc: an abort names no choice",
        "engine.backends.custom.frontend.engine_link",
        "self._client.send(Abort(request_id, choice))",
        "self._client.send(Abort(request_id))",
        f"{LINK_TESTS}::test_forgetting_a_choice_keeps_the_others",
    ),
    Mutation(
        "ipc: controls wait for ever for a dead engine",
        "engine.backends.custom.frontend.engine_link",
        "                reply.set_exception(error)\n",
        "                pass\n",
        f"{LINK_TESTS}::test_a_death_ends_requests_and_controls_and_is_told_in_words",
    ),
    Mutation(
        "ipc: a dead engine's figures are shown",
        "engine.backends.custom.frontend.engine_link",
        "        self.stats = None\n        self._fail_open",
        "        self._fail_open",
        f"{LINK_TESTS}::test_a_death_ends_requests_and_controls_and_is_told_in_words",
    ),
    Mutation(
        "ipc: one late look kills",
        "engine.backends.custom.frontend.engine_link",
        "        while num_looks < 2:",
        "        while num_looks < 1:",
        f"{LINK_TESTS}::test_the_silent_are_woken_and_who_does_not_go_on_is_killed",
    ),
    Mutation(
        "ipc: a step is killed when its patience ends for the first time",
        "engine.backends.custom.frontend.engine_link",
        "> KILL_PATIENCES * vitals.patience_s",
        "> vitals.patience_s",
        f"{LINK_TESTS}::test_the_silent_are_woken_and_who_does_not_go_on_is_killed",
    ),
    Mutation(
        "ipc: the silent are killed when they should be woken",
        "engine.backends.custom.frontend.engine_link",
        "silent_s > KILL_AFTER_S else 0",
        "silent_s > WAKE_AFTER_S else 0",
        f"{LINK_TESTS}::test_the_silent_are_woken_and_who_does_not_go_on_is_killed",
    ),
    Mutation(
        "ipc: an engine that loads is killed for its silence",
        "engine.backends.custom.frontend.engine_link",
        "            if vitals is None or self.ready is None:\n                continue\n",
        "            if vitals is None:\n                continue\n",
        f"{LINK_TESTS}::test_a_loading_engine_may_be_silent",
    ),
    Mutation(
        "ipc: an engine that died too often is restarted at once",
        "engine.backends.custom.frontend.engine_link",
        "            delay = self._cool_down_s\n",
        "            delay = 0.0\n",
        f"{LINK_TESTS}::test_dying_too_often_the_pause_is_the_cool_down",
    ),
    Mutation(
        "ipc: a process that could not be made is not tried again",
        "engine.backends.custom.frontend.engine_link",
        "            self._client = None\n            self._restart_later()\n",
        "            self._client = None\n",
        f"{LINK_TESTS}::test_a_process_that_can_not_be_made_is_tried_again",
    ),
    Mutation(
        "ipc: clients read what the engine's log should keep",
        "engine.backends.custom.frontend.engine_link",
        "UnavailableError(self.detail) if self._has_loaded else self._fatal",
        "self._fatal",
        f"{LINK_TESTS}::test_what_ended_a_loaded_engine_is_for_its_log_and_not_for_clients",
    ),
    Mutation(
        "ipc: restarts pause as long each time",
        "engine.backends.process",
        "self.first_delay_s * 2 ** (len(self._deaths) - 1)",
        "self.first_delay_s * 2",
        "tests/unit/test_engine_link.py::test_backoff_grows_is_capped_and_gives_up",
    ),
    Mutation(
        "ipc: a part of a frame is taken for a whole one",
        "engine.backends.custom.ipc.transport",
        "            if len(self._buffer) < end:\n",
        "            if len(self._buffer) < length:\n",
        f"{FRAME_TESTS}::test_messages_arrive_as_they_were_sent_however_they_are_cut",
    ),
    Mutation(
        "ipc: frames of any length are collected",
        "engine.backends.custom.ipc.transport",
        "            if length > MAX_FRAME_BYTES:\n",
        "            if length > 16 * MAX_FRAME_BYTES:\n",
        f"{FRAME_TESTS}::test_a_message_over_the_limit_is_refused_by_its_length_alone",
    ),
    Mutation(
        "ipc: a closed socket is an empty one",
        "engine.backends.custom.ipc.transport",
        '            raise ConnectionClosedError("the other side closed the connection")\n',
        "            return []\n",
        f"{FRAME_TESTS}::test_a_channel_gives_what_has_come_and_tells_of_the_end",
    ),
    Mutation(
        "ipc: a thread's inbox is read one message a turn",
        "engine.backends.custom.frontend.engine_client",
        "            while True:\n                messages.append(self.inbox.get_nowait())\n",
        "            if not messages:\n                messages.append(self.inbox.get_nowait())\n",
        f"{FRAME_TESTS}::test_an_engine_in_a_thread_reads_all_that_waits_for_it",
    ),
    Mutation(
        "ipc: an idle engine has a step that grows old",
        "engine.backends.custom.ipc.heartbeat",
        "/ 1e9 if turns and busy else None",
        "/ 1e9 if turns else None",
        f"{FRAME_TESTS}::test_both_sides_see_one_pulse",
    ),
    Mutation(
        "ipc: patience is told in another unit",
        "engine.backends.custom.ipc.heartbeat",
        "        patience_ns = int(patience_s * 1e9)\n",
        "        patience_ns = int(patience_s * 1e6)\n",
        f"{FRAME_TESTS}::test_both_sides_see_one_pulse",
    ),
    Mutation(
        "ipc: a pool's megabytes are millions",
        "engine.backends.custom.engine_settings",
        "pool_bytes=pool_mb * 2**20 if",
        "pool_bytes=pool_mb * 10**6 if",
        f"{OPTION_TESTS}::test_every_option_is_a_setting_and_none_is_mixed_up",
    ),
    Mutation(
        "ipc: the size of a batch bounds the queue",
        "engine.backends.custom.engine_settings",
        "max_queued=performance.max_queued_requests,",
        "max_queued=performance.batch_size,",
        f"{OPTION_TESTS}::test_every_option_is_a_setting_and_none_is_mixed_up",
    ),
    Mutation(
        "ipc: a runner computes in what was asked for and not in what was found",
        "engine.backends.custom.worker.main",
        "        dtype=device.dtype,\n        block_size=options.block_size,\n        num_blocks",
        "        dtype=options.dtype,\n        block_size=options.block_size,\n        num_blocks",
        f"{OPTION_TESTS}::test_a_runner_is_told_what_was_planned",
    ),
    Mutation(
        "ipc: a bound on the cache counts tokens as blocks",
        "engine.backends.custom.worker.main",
        "    block_bytes = bytes_per_token * spec.block_size\n",
        "    block_bytes = bytes_per_token\n",
        f"{OPTION_TESTS}::test_the_cache_is_bounded_as_asked_for",
    ),
    Mutation(
        "ipc: an engine is ready before it is warm",
        "engine.backends.custom.worker.main",
        "    warm_up(runner)\n    on_loaded()\n",
        "    on_loaded()\n",
        f"{OPTION_TESTS}::test_an_engine_says_what_it_holds_once_it_is_warm",
    ),
    Mutation(
        "ipc: the null block is told as one that can be had",
        "engine.backends.custom.worker.main",
        "            num_blocks=spec.num_blocks - 1,\n",
        "            num_blocks=spec.num_blocks,\n",
        f"{OPTION_TESTS}::test_an_engine_says_what_it_holds_once_it_is_warm",
    ),
    Mutation(
        "ipc: a stall is reported at every tick",
        "engine.backends.custom.ipc.heartbeat",
        "if is_stalled and not self._was_stalled:",
        "if is_stalled:",
        f"{FRAME_TESTS}::test_a_stall_is_reported_and_interrupted_once",
    ),
]
