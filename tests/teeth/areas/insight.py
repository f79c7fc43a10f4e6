"""Mistakes in what is measured of a request, and in who may see it."""

from tests.teeth.mutation import Mutation

EXPLAIN_TESTS = "tests/unit/servers/ops/test_explain.py"
API_TESTS = "tests/unit/servers/ops/test_requests_api.py"
NAMED = f"{EXPLAIN_TESTS}::test_the_cause_of_a_slow_request_inside_the_engine_is_named"

MUTATIONS = [
    Mutation(
        "insight: a lack of blocks looks like a lack of budget",
        "engine.runtime.scheduler",
        '                self._block("blocks")\n',
        '                self._block("budget")\n',
        f"{NAMED}[blocks]",
    ),
    Mutation(
        "insight: time that others spent waiting counts for a held sequence",
        "engine.runtime.insight.request_timing",
        "        for reason in (STEP, BUDGET, BLOCKS):\n",
        "        for reason in (STEP, BUDGET):\n",
        f"{EXPLAIN_TESTS}::test_time_held_for_a_shared_prefix_is_not_attributed_to_other_waits",
    ),
    Mutation(
        "insight: a prompt that was never computed counts as evicted",
        "engine.runtime.insight.request_timing",
        "        while count < len(chain) and chain[count] in seen:\n",
        "        while count < len(chain):\n",
        f"{NAMED}[cold]",
    ),
    Mutation(
        "insight: a tenant finds the requests of others by their ids",
        "engine.servers.http.request_log",
        "in self.newest(tenant) if _is_meant",
        "in self.newest(None) if _is_meant",
        f"{API_TESTS}::test_a_tenant_sees_its_own_requests_and_the_admin_all",
    ),
    Mutation(
        "insight: what happened to a client that left is lost",
        "engine.frontend.request_recovery",
        "        self._left[request_id] = notes\n",
        "",
        f"{API_TESTS}::test_a_disconnected_request_is_explained",
    ),
    Mutation(
        "insight: kernels are timed although nobody watches",
        "engine.runtime.insight.snapshot",
        "            self._time_kernels(False)\n",
        "            pass\n",
        "tests/unit/servers/ops/test_live.py::test_kernels_are_timed_only_while_a_live_view_is_open",
    ),
    Mutation(
        "replay: only the length of an answer is compared",
        "engine.servers.ops.replay",
        "    if list(again[: len(recorded)]) == list(recorded):\n",
        "    if len(again) >= len(recorded):\n",
        "tests/unit/servers/ops/test_replay.py::test_replay_finds_a_changed_token",
    ),
    Mutation(
        "replay: a recorded request loses its seed",
        "engine.backends.custom.base_custom",
        "            params = msgspec.structs.replace(params, seed=secrets.randbits(62))\n",
        "            pass\n",
        "tests/unit/servers/ops/test_replay.py::test_recorded_requests_give_the_same_tokens",
    ),
]
