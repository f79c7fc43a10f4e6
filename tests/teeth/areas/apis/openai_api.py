"""Mutations of OpenAI's completions, chats and embeddings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "tenants of embeddings are not told",
        "engine.servers.openai.embeddings",
        "        tenant=principal_of(request).name,\n",
        "",
        "tests/unit/servers/access/test_server_tenants.py"
        "::test_tenant_deadline_and_priority_reach_the_backend_from_every_route",
    ),
    Mutation(
        "embeddings of all share one salt",
        "engine.servers.openai.embeddings",
        "        salt=principal_of(request).name,\n",
        "",
        "tests/unit/servers/access/test_server_tenants.py"
        "::test_tenant_deadline_and_priority_reach_the_backend_from_every_route",
    ),
    Mutation(
        "stored chats: a filter by metadata compares the values alone",
        "engine.servers.storage.tables",
        "WHERE key = ? AND value = ?)",
        "WHERE key <> ? AND value = ?)",
        "tests/unit/servers/openai/test_server_stored_chats.py::test_stored_chats_are_listed_with_filters_and_pages",
    ),
    Mutation(
        "stored chats: the list has the old metadata",
        "engine.servers.openai.stored_chats",
        '"UPDATE chat_completions SET metadata = ? WHERE id = ?", (encoded, chat_id)',
        '"UPDATE chat_completions SET metadata = metadata"',
        "tests/unit/servers/openai/test_server_stored_chats.py::test_stored_chats_are_listed_with_filters_and_pages",
    ),
    Mutation(
        "stored chats: anybody's are listed",
        "engine.servers.openai.stored_chats",
        "WHERE chat_completions.owner = ? AND",
        "WHERE ? IS NOT NULL AND",
        "tests/unit/servers/openai/test_server_stored_chats.py::test_stored_chats_are_private_and_survive_a_restart",
    ),
    Mutation(
        "moderations: a middle score is no reason",
        "engine.servers.openai.moderations",
        "score >= THRESHOLD",
        "score > THRESHOLD",
        "tests/unit/servers/openai/test_server_moderations.py::test_moderation_rates_each_text_separately",
    ),
    Mutation(
        "moderations: any model's name is answered in silence",
        "engine.servers.openai.moderations",
        "if asked is not None and asked not in (name, card.id):",
        "if False:",
        "tests/unit/servers/openai/test_server_moderations.py"
        "::test_openais_moderation_model_names_are_accepted_with_a_warning",
    ),
    Mutation(
        "embeddings have no priority",
        "engine.servers.openai.embeddings",
        "        priority=priority_of(services, request, card, body.priority),\n",
        "",
        "tests/unit/servers/openai/test_server_embeddings.py::test_embedding_options_reach_the_backend",
    ),
    Mutation(
        "embeddings wait for ever",
        "engine.servers.openai.embeddings",
        "        queue_timeout_s=queue_timeout_s(services, request),\n",
        "",
        "tests/unit/servers/access/test_server_tenants.py"
        "::test_tenant_deadline_and_priority_reach_the_backend_from_every_route",
    ),
    Mutation(
        "chats: cached tokens are not told",
        "engine.servers.openai.format",
        '"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}',
        '"prompt_tokens_details": {"cached_tokens": 0}',
        "tests/unit/servers/openai/test_server_openai.py::test_chat_completion_body_has_openais_shape",
    ),
    Mutation(
        "offsets count bytes",
        "engine.servers.openai.logprobs",
        "return len(token.token_bytes.translate(None, _CONTINUATIONS))",
        "return len(token.token_bytes)",
        "tests/unit/servers/openai/test_openai_format.py::test_text_offsets_count_characters_per_choice",
    ),
    Mutation(
        "offsets of choices are mixed",
        "engine.servers.openai.format",
        "        self.offsets[event.choice] += sum(",
        "        self.offsets[0] += sum(",
        "tests/unit/servers/openai/test_openai_format.py::test_text_offsets_count_characters_per_choice",
    ),
    Mutation(
        "half a character has a whole one's bytes",
        "engine.servers.openai.logprobs",
        '"bytes": list(token.token_bytes)',
        '"bytes": list(token.token.encode())',
        "tests/unit/servers/openai/test_openai_format.py::test_logprob_bytes_are_those_of_each_token",
    ),
    Mutation(
        "the stop string is not told",
        "engine.servers.openai.format",
        "stop = finish.stop_reason",
        "stop = None",
        "tests/unit/servers/openai/test_openai_format.py::test_stop_reason_is_the_matched_string_or_token",
    ),
    Mutation(
        "a named tool's call ends with tool_calls",
        "engine.servers.openai.format",
        'if has_calls and not named_tool else "stop"',
        'if has_calls else "stop"',
        "tests/unit/servers/openai/test_server_tools.py::test_tool_calls_set_the_finish_reason",
    ),
    Mutation(
        "best_of judges the prompt",
        "engine.servers.openai.format",
        "(self.tokens if event.num_tokens else self.prompt)",
        "self.tokens",
        "tests/unit/servers/openai/test_server_parameters.py::test_best_of_ranks_without_the_prompts_logprobs",
    ),
    Mutation(
        "calls are in the order of their arrival",
        "engine.servers.openai.format",
        "for _, call in sorted(choice.calls.items())",
        "for _, call in choice.calls.items()",
        "tests/unit/servers/openai/test_openai_format.py::test_tool_calls_are_ordered_by_index",
    ),
    Mutation(
        "a second prompt is refused for having waited for the first",
        "engine.servers.serving.generation",
        "queue_timeout_s=context.queue_timeout_s if index == 0 else None",
        "queue_timeout_s=context.queue_timeout_s",
        "tests/unit/servers/access/test_server_tenants.py"
        "::test_only_the_first_of_several_prompts_may_hit_the_queue_timeout",
    ),
    Mutation(
        "negative seeds are mirrored",
        "engine.servers.schema.body",
        'changed["seed"] = body.seed % 2**63',
        'changed["seed"] = abs(body.seed)',
        "tests/unit/servers/openai/test_server_validation.py::test_sampling_fields_reach_the_sampling_params",
    ),
    Mutation(
        "top_p 0 keeps everything",
        "engine.servers.schema.body",
        'changed |= {"top_k": 1, "top_p": 1.0}',
        'changed |= {"top_p": 1.0}',
        "tests/unit/servers/openai/test_server_validation.py::test_sampling_fields_reach_the_sampling_params",
    ),
    Mutation(
        "max_completion_tokens is ignored",
        "engine.servers.openai.schema",
        "limit = self.max_completion_tokens or self.max_tokens\n",
        "limit = self.max_tokens\n",
        "tests/unit/servers/openai/test_server_validation.py::test_numeric_chat_parameters_are_accepted_and_refused_at_their_bounds",
    ),
    Mutation(
        "usage so far: tokens without text are not counted",
        "engine.servers.openai.token_streams",
        "self._num_tokens[choice] += event.num_tokens",
        "self._num_tokens[choice] += bool(event.text)",
        "tests/unit/servers/openai/test_server_prompt_lengths.py::test_continuous_usage_counts_tokens_without_text",
    ),
    Mutation(
        "usage so far: every choice has the first prompt",
        "engine.servers.openai.token_streams",
        "self._prompts[choice * len(self._prompts) // len(self._num_tokens)]",
        "self._prompts[0]",
        "tests/unit/servers/openai/test_server_prompt_lengths.py::test_continuous_usage_is_in_every_chunk",
    ),
    Mutation(
        "fim: the suffix is dropped",
        "engine.servers.openai.completions",
        "            prompt=body.prompt,\n            suffix=body.suffix or None,",
        "            prompt=body.prompt,\n            suffix=None,",
        "tests/unit/servers/openai/test_server_prompt_texts.py::test_fim_completions_have_the_shape_of_a_chat",
    ),
]
