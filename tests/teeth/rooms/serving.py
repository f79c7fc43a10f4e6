"""Mistakes in what all routes share: admission, quotas, tenants, deadlines, endings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "quotas: what was charged too much is kept",
        "engine.servers.quotas",
        "        difference = num_tokens - self.num_charged\n",
        "        difference = 0\n",
        "tests/unit/test_quotas.py::test_what_is_used_in_the_end_is_what_counts",
    ),
    Mutation(
        "quotas: what was charged too little is forgiven",
        "engine.servers.quotas",
        "        if difference > 0:\n"
        "            await self._windows.add(self._tokens, difference)\n",
        "",
        "tests/unit/test_quotas.py::test_an_answer_longer_than_was_charged_is_charged_after_all",
    ),
    Mutation(
        "quotas: a refused request counts",
        "engine.servers.quotas",
        "            window = await self._windows.add(self._requests, -1, window.minute)\n",
        "",
        "tests/unit/test_quotas.py::test_requests_in_a_minute",
    ),
    Mutation(
        "quotas: refused tokens count",
        "engine.servers.quotas",
        "            window = await self._windows.add(self._tokens, -tokens, window.minute)\n",
        "",
        "tests/unit/test_quotas.py::test_tokens_are_charged_before_and_put_right_after",
    ),
    Mutation(
        "quotas: the administrator is limited",
        "engine.servers.quotas",
        "        if principal.is_admin or limits.is_empty:",
        "        if limits.is_empty:",
        "tests/unit/test_quotas.py"
        "::test_keys_of_one_tenant_are_counted_apart_and_the_administrator_is_not",
    ),
    Mutation(
        "quotas: a tenant's keys share one limit",
        "engine.servers.quotas",
        "key = principal.key or principal.name",
        "key = principal.name",
        "tests/unit/test_quotas.py"
        "::test_keys_of_one_tenant_are_counted_apart_and_the_administrator_is_not",
    ),
    Mutation(
        "quotas: a full minute takes an empty prompt",
        "engine.servers.quotas",
        "window.used - tokens > limit - 1",
        "window.used - tokens > limit",
        "tests/unit/test_quotas.py"
        "::test_a_key_without_room_for_one_token_is_not_asked_for_an_empty_body",
    ),
    Mutation(
        "quotas: an IPv6 client has many addresses to try keys from",
        "engine.servers.quotas",
        "parsed, 64)",
        "parsed, 128)",
        "tests/unit/test_quotas.py::test_addresses_of_one_network_are_one_client",
    ),
    Mutation(
        "quotas: only one prompt's answers are charged",
        "engine.servers.lifecycle",
        "num_answers = len(sources) * num_choices",
        "num_answers = num_choices",
        "tests/unit/test_quotas.py::test_every_choice_of_every_prompt_is_charged",
    ),
    Mutation(
        "quotas: prompts are free",
        "engine.servers.lifecycle",
        "return usage.prompt_tokens + usage.completion_tokens",
        "return usage.completion_tokens",
        "tests/unit/test_quotas.py::test_what_is_used_in_the_end_is_what_counts",
    ),
    Mutation(
        "quotas: whoever leaves has used no prompt",
        "engine.servers.lifecycle",
        "return self._lease.num_prompt + sum(generation.choice_tokens)",
        "return sum(generation.choice_tokens)",
        "tests/unit/test_quotas.py::test_who_leaves_before_the_first_token_has_used_the_prompt",
    ),
    Mutation(
        "quotas: vectors are charged for an answer",
        "engine.servers.lifecycle",
        "            if writes:\n",
        "            if True:\n",
        "tests/unit/test_quotas.py::test_vectors_are_charged_for_their_prompts_alone",
    ),
    Mutation(
        "drain: a server that ends takes requests again",
        "engine.servers.lifecycle",
        "self.is_draining = self.is_ending\n",
        "self.is_draining = False\n",
        "tests/unit/test_server_admission.py::test_a_pause_ends_and_an_end_does_not",
    ),
    Mutation(
        "admission: prompts of a list are given back once",
        "engine.servers.lifecycle",
        "            self._num_reserved = len(sources)\n",
        "",
        "tests/unit/test_server_admission.py::test_each_prompt_of_a_list_counts",
    ),
    Mutation(
        "tenants: the backend is not told whose a request is",
        "engine.servers.services",
        "            tenant=principal.name,\n            timeout_s",
        "            timeout_s",
        "tests/unit/test_server_tenants.py"
        "::test_the_backend_knows_whose_a_request_is_and_how_long_it_may_take",
    ),
    Mutation(
        "deadlines: the backend is not told how long a request may take",
        "engine.servers.services",
        "            timeout_s=self.settings.server.request_timeout_s,\n            queue",
        "            queue",
        "tests/unit/test_server_tenants.py"
        "::test_the_backend_knows_whose_a_request_is_and_how_long_it_may_take",
    ),
    Mutation(
        "deadlines: the backend is not told how long a request may wait",
        "engine.servers.services",
        "            queue_timeout_s=self.queue_timeout_s(request),\n",
        "",
        "tests/unit/test_server_tenants.py"
        "::test_the_backend_knows_whose_a_request_is_and_how_long_it_may_take",
    ),
    Mutation(
        "deadlines: a batch's line is refused for having waited",
        "engine.servers.services",
        "return None if is_own else self",
        "return self",
        "tests/unit/test_server_tenants.py::test_work_that_was_left_with_the_server_may_wait",
    ),
    Mutation(
        "sessions do not reach the router",
        "engine.servers.services",
        "            session=_session(request, body),\n",
        "",
        "tests/unit/test_server_tenants.py::test_sessions_are_told_apart_without_their_names",
    ),
    Mutation(
        "tenants: one can name another's salt",
        "engine.servers.services",
        "salt = _digest(principal.name, body.cache_salt)",
        "salt = _digest('', body.cache_salt)",
        "tests/unit/test_server_parameters.py::test_a_salt_parts_caches_and_never_joins_them",
    ),
    Mutation(
        "tenants: sessions of one name are one session",
        "engine.servers.services",
        'return _digest(principal_of(request).name, named) if named else ""',
        'return named or ""',
        "tests/unit/test_server_tenants.py::test_sessions_are_told_apart_without_their_names",
    ),
    Mutation(
        "usage: only the last prompt's cached tokens are told",
        "engine.servers.generation",
        "        cached_tokens=total.cached_tokens + part.cached_tokens,",
        "        cached_tokens=part.cached_tokens,",
        "tests/unit/test_server_openai.py::test_completion_fans_out_over_prompts",
    ),
    Mutation(
        "choices of several prompts are mixed",
        "engine.servers.generation",
        "self._pump(source, position * choices_per_source)",
        "self._pump(source, position)",
        "tests/unit/test_server_openai.py::test_completion_fans_out_over_prompts",
    ),
    Mutation(
        "usage: tokens of reasoning are lost",
        "engine.servers.generation",
        "        reasoning_tokens=total.reasoning_tokens + part.reasoning_tokens,",
        "        reasoning_tokens=total.reasoning_tokens,",
        "tests/unit/test_server_tools.py::test_reasoning_has_both_names",
    ),
    Mutation(
        "the last failure is told, not the first",
        "engine.servers.generation",
        "        if self.failure is None and self._open:\n",
        "        if self._open:\n",
        "tests/unit/test_server_admission.py::test_the_first_failure_is_the_one_that_is_told",
    ),
    Mutation(
        "joined text loses its ids",
        "engine.servers.generation",
        "        token_ids=tuple(token_id for each in texts for token_id in each.token_ids),\n",
        "",
        "tests/unit/test_server_admission.py::test_coalesce_joins_only_neighbours_of_one_choice",
    ),
    Mutation(
        "every ending counts as a stop",
        "engine.servers.generation",
        '"length" if event.reason == "length" else "stop"',
        '"stop"',
        "tests/unit/test_server_admission.py::test_metrics_follow_requests",
    ),
    Mutation(
        "audit: the oldest changes are shown first",
        "engine.servers.audit",
        "reversed(lines[-count:])",
        "lines[-count:]",
        "tests/unit/test_admin.py::test_the_audit_log_is_bounded_and_never_in_the_way",
    ),
]
