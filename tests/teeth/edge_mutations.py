"""Mutations at the server's edge: keys, limits, web pages, plugins, model files, fair shares."""

from tests.teeth.mutation import Mutation

AUTH = "engine.servers.access.auth"
QUOTAS = "engine.servers.access.quotas"
BODIES = "engine.servers.http.limits"
GUARD = "engine.servers.access.auth"
PLUGIN = "engine.plugins.host"
EXAMINATION = "engine.core.sandbox.checkpoint_validation"
CHILD = "engine.core.sandbox.validation_child"
SHARES = "engine.runtime.sequence_table"

AUTH_TESTS = "tests/security/access/test_http_auth.py"
KEY_TESTS = "tests/security/access/test_keys.py"
LIMIT_TESTS = "tests/security/requests/test_http_limits.py"
QUOTA_TESTS = "tests/unit/servers/access/test_quotas.py"
PLUGIN_TESTS = "tests/security/processes/test_misbehaving_plugins.py"
EXAMINATION_TESTS = "tests/security/files/test_checkpoint_validation.py"
SHARE_TESTS = "tests/unit/runtime/test_fair_share.py"

KEYS = [
    Mutation(
        "SEC-22 no key is needed",
        AUTH,
        "        if principal is None and route not in PUBLIC_ROUTES:\n",
        "        if False:\n",
        f"{AUTH_TESTS}::test_every_route_needs_the_key",
    ),
    Mutation(
        "SEC-22 any key administers",
        AUTH,
        "        if principal is not None and is_administrative:\n",
        "        if False:\n",
        f"{KEY_TESTS}::test_admin_routes_need_the_admin_key",
    ),
    Mutation(
        "SEC-21 keys are compared byte by byte",
        AUTH,
        "                if hmac.compare_digest(presented, expected):\n",
        "                if presented == expected:\n",
        "tests/security/access/test_key_compare.py",
    ),
    Mutation(
        "SEC-21 keys are guessed without a pause",
        QUOTAS,
        "        if window.used > self.max_per_minute:\n",
        "        if False:\n",
        f"{KEY_TESTS}::test_failed_authentications_are_throttled_by_address",
    ),
    Mutation(
        "SEC-21 keys are short",
        "engine.core.key_file",
        "KEY_BYTES = 32\n",
        "KEY_BYTES = 12\n",
        f"{KEY_TESTS}::test_a_new_key_is_long_shown_once_and_stored_only_as_a_hash",
    ),
    Mutation(
        "SEC-21 a keys file that others write is read",
        "engine.core.key_file",
        "        with open_private(path) as file:\n",
        "        with open(path, 'rb') as file:\n",
        f"{KEY_TESTS}::test_a_key_file_writable_by_others_is_refused",
    ),
    Mutation(
        "SEC-31 all tenants are one",
        "engine.servers.access.auth",
        '(f"tenant\\n{entry.tenant_name}".encode())',
        '(b"tenant")',
        f"{KEY_TESTS}::test_a_keys_tenant_owns_objects_and_a_cache_namespace",
    ),
]

LIMITS = [
    Mutation(
        "limits: requests in a minute are not counted",
        QUOTAS,
        "        if window.used > limit:\n",
        "        if False:\n",
        f"{QUOTA_TESTS}::test_requests_per_minute_are_limited",
    ),
    Mutation(
        "limits: tokens in a minute are not counted",
        QUOTAS,
        "        if window.used > limit or window.used - tokens > limit - 1:\n",
        "        if False:\n",
        f"{QUOTA_TESTS}::test_tokens_are_charged_before_a_request_and_corrected_after",
    ),
    Mutation(
        "limits: what was not used is not given back",
        QUOTAS,
        "        difference = num_tokens - self.num_charged\n",
        "        difference = 0\n",
        f"{QUOTA_TESTS}::test_tokens_are_charged_before_a_request_and_corrected_after",
    ),
    Mutation(
        "limits: a place is not given back",
        QUOTAS,
        "        leases.remove(lease)\n",
        "",
        f"{QUOTA_TESTS}::test_every_kind_of_ending_refunds_the_charge",
    ),
    Mutation(
        "limits: one more at once",
        QUOTAS,
        "len(leases) >= limits.max_concurrent:",
        "len(leases) > limits.max_concurrent:",
        f"{QUOTA_TESTS}::test_concurrent_and_queued_requests_are_limited",
    ),
    Mutation(
        "limits: the queue has no end",
        QUOTAS,
        "len(queued) >= limits.max_queued:",
        "False:",
        f"{QUOTA_TESTS}::test_concurrent_and_queued_requests_are_limited",
    ),
    Mutation(
        "limits: prompts that wait have any length",
        QUOTAS,
        "        if num_tokens + lease.num_prompt > most:\n",
        "        if False:\n",
        f"{QUOTA_TESTS}::test_concurrent_and_queued_requests_are_limited",
    ),
    Mutation(
        "SEC-03 a chunked body has no end",
        BODIES,
        "        if len(body) + len(chunk) > max_bytes:\n",
        "        if False:\n",
        f"{LIMIT_TESTS}::test_a_chunked_body_is_refused_as_soon_as_it_exceeds_the_limit",
    ),
    Mutation(
        "SEC-03 depth has no end",
        BODIES,
        "            if depth > MAX_DEPTH:\n",
        "            if False:\n",
        f"{LIMIT_TESTS}::test_json_nesting_depth_is_counted_outside_strings",
    ),
    Mutation(
        "SEC-20 a head may take for ever",
        "engine.servers.http.protocol",
        "self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)",
        "self.loop.call_later(3600, self.transport.close)",
        f"{LIMIT_TESTS}::test_silent_and_slow_connections_are_closed",
    ),
]

PAGES = [
    Mutation(
        "SEC-27 foreign pages may change things",
        GUARD,
        "        if all(self._is_friendly(origin, hosts) for origin in",
        "        if True or all(self._is_friendly(origin, hosts) for origin in",
        f"{AUTH_TESTS}::test_cross_origin_requests_may_not_change_anything",
    ),
    Mutation(
        "SEC-27 any host name is ours",
        GUARD,
        "        if len(names) != 1:\n            return False\n",
        "        return True\n",
        f"{AUTH_TESTS}::test_host_header_is_checked_against_allowed_hosts",
    ),
]

PLUGINS = [
    Mutation(
        "FLT-23 a plugin that fails is kept",
        PLUGIN,
        "        if self._in_a_row.total() >= MAX_FAILURES and not self._is_off:\n",
        "        if False:\n",
        f"{PLUGIN_TESTS}::test_a_failing_plugin_with_on_failure_pass_is_skipped",
    ),
    Mutation(
        "FLT-23 a plugin's failure is the request's",
        PLUGIN,
        "        except Exception as error:\n"
        "            self._fail(hook, error)\n"
        "            raise self.refusal() from None\n"
        "        mistake",
        "        except ZeroDivisionError:\n            raise\n        mistake",
        f"{PLUGIN_TESTS}::test_a_failing_plugin_with_on_failure_pass_is_skipped",
    ),
    Mutation(
        "FLT-23 a plugin may take for ever",
        "engine.plugins.host",
        "        async with asyncio.timeout(timeout_s):\n",
        "        async with asyncio.timeout(None):\n",
        f"{PLUGIN_TESTS}::test_a_plugin_that_sleeps_does_not_block_the_event_loop",
    ),
    Mutation(
        "FLT-23 a plugin changes what it may not",
        PLUGIN,
        "        if mistake is not None:\n",
        "        if False:\n",
        f"{PLUGIN_TESTS}::test_a_change_that_a_plugin_may_not_make_is_a_failure",
    ),
    Mutation(
        "FLT-23 a plugin's words are a client's words",
        PLUGIN,
        '        log.debug("plugin %s", self.name, exc_info=error)\n',
        '        log.error("plugin %s", self.name, exc_info=error)\n',
        f"{PLUGIN_TESTS}::test_plugin_failures_are_logged_without_client_text",
    ),
]

LED_ASTRAY = (
    f"{EXAMINATION_TESTS}::test_a_parser_that_fills_memory_spins_or_crashes_ends_only_the_sandbox"
)
MODEL_FILES = [
    Mutation(
        "validation: a reader that died has read",
        EXAMINATION,
        "        if status != 0:\n",
        "        if False:\n",
        LED_ASTRAY,
    ),
    Mutation(
        "validation: a changed file counts as read",
        EXAMINATION,
        "            return file.read(len(identity) + 1) == identity\n",
        "            return bool(file.read(1))\n",
        f"{EXAMINATION_TESTS}::test_a_file_is_validated_once_until_it_changes",
    ),
    Mutation(
        "validation: memory has no end",
        CHILD,
        "        (resource.RLIMIT_AS, 2 * size + HEADROOM_BYTES),\n",
        "",
        LED_ASTRAY,
    ),
    Mutation(
        "validation: processor time has no end",
        CHILD,
        "        (resource.RLIMIT_CPU, max_cpu_s),\n",
        "",
        LED_ASTRAY,
    ),
    Mutation(
        "validation: programs and connections are allowed",
        CHILD,
        "    sys.addaudithook(_refuse)\n",
        "",
        LED_ASTRAY,
    ),
    Mutation(
        "validation: what a changed file held is kept",
        EXAMINATION,
        '        return output if identity_of(self._path) == self._identity else b""\n',
        "        return output\n",
        "tests/unit/frontend/test_text_cache.py"
        "::test_a_file_changed_during_validation_is_read_again",
    ),
    Mutation(
        "validation: a fork keeps the engine's socket",
        CHILD,
        "            _close_files()\n",
        "",
        f"{EXAMINATION_TESTS}::test_the_forked_validator_inherits_no_open_files",
    ),
]

FAIR_SHARE = [
    Mutation(
        "FLT-04 a loop that does not turn is alive for ever",
        "engine.servers.ops.probes",
        "return time.monotonic() - self._noted.at > STUCK_AFTER_S",
        "return False",
        "tests/unit/servers/ops/test_probes.py::test_an_event_loop_that_is_stuck_is_reported_by_livez",
    ),
    Mutation(
        "fair share: nothing is charged",
        SHARES,
        "        self._given[seq.tenant] = before + _guess(seq)\n",
        "        self._given[seq.tenant] = before\n",
        f"{SHARE_TESTS}::test_a_flood_of_one_tenant_does_not_keep_others_waiting",
    ),
    Mutation(
        "fair share: staying away saves up turns",
        SHARES,
        "        return max(self.given(tenant), self._clock)\n",
        "        return self._given.get(tenant, 0)\n",
        f"{SHARE_TESTS}::test_an_idle_tenant_does_not_save_up_turns",
    ),
    Mutation(
        "fair share: a guess is never put right",
        SHARES,
        "self.given(seq.tenant) + actual - _guess(seq)\n",
        "self.given(seq.tenant)\n",
        f"{SHARE_TESTS}::test_tokens_that_were_not_generated_are_refunded",
    ),
]

TEXTS = [
    Mutation(
        "SEC-15 a template may take for ever",
        "engine.core.text.template_sandbox",
        "            if left <= 0:\n",
        "            if False:\n",
        "tests/security/requests/test_jinja.py::test_template_bombs_are_stopped_early_with_little_memory",
    ),
    Mutation(
        "SEC-05 control tokens in a client's text are control tokens",
        "engine.core.text.chat_template",
        "        if not self._mask:\n            return value\n",
        "        if value is not None:\n            return value\n",
        "tests/security/requests/test_token_smuggling.py::test_message_content_cannot_end_its_turn",
    ),
]

EDGE = KEYS + LIMITS + PAGES + PLUGINS + MODEL_FILES + FAIR_SHARE + TEXTS
