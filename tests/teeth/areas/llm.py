"""Mistakes in the Python API."""

from tests.teeth.mutation import Mutation

TESTS = "tests/unit/library/test_llm.py"
SAMPLING_TESTS = "tests/unit/library/test_llm_sampling.py"

MUTATIONS = [
    Mutation(
        "llm: settings that are given are not used",
        "engine.library.arguments",
        "        return {**flags, **(self.settings or {})}\n",
        "        return flags\n",
        f"{TESTS}::test_llm_runs_the_engine_in_process_with_the_given_settings",
    ),
    Mutation(
        "llm: without parameters an answer has sixteen tokens",
        "engine.sampling_params",
        'SamplingParams(**{"max_tokens": None, **fields})',
        'SamplingParams(**{"max_tokens": 2, **fields})',
        f"{SAMPLING_TESTS}::test_without_max_tokens_the_context_is_filled",
    ),
    Mutation(
        "llm: choices beyond the first are lost",
        "engine.library.answers",
        "for choice in choices or self._choices\n",
        "for choice in choices or self._choices[:1]\n",
        f"{SAMPLING_TESTS}::test_choices_are_numbered_and_counted",
    ),
    Mutation(
        "llm: token ids of all choices are mixed",
        "engine.library.answers",
        "        choice = self._choices[event.choice]\n        choice.add(event)\n",
        "        choice = self._choices[0]\n        choice.add(event)\n",
        f"{SAMPLING_TESTS}::test_choices_are_numbered_and_counted",
    ),
    Mutation(
        "llm: answers come in the order in which they end",
        "engine.library.embedded",
        "            return await asyncio.gather(*tasks)\n",
        "            return [await each for each in asyncio.as_completed(tasks[::-1])]\n",
        f"{TESTS}::test_outputs_keep_prompt_order_although_answers_end_at_different_times",
    ),
    Mutation(
        "llm: the queue's bound counts requests and not choices",
        "engine.library.embedded",
        "max(1, self.max_queued // most)",
        "max(1, self.max_queued)",
        f"{TESTS}::test_requests_in_flight_are_bounded_by_the_queue",
    ),
    Mutation(
        "llm: one conversation is taken for several",
        "engine.llm",
        "        batch: Any = [messages] if single else messages\n",
        "        batch: Any = messages if single else [messages]\n",
        f"{TESTS}::test_chat_takes_one_conversation_or_a_list_of_them",
    ),
    Mutation(
        "llm: a list of ids is taken for prompts",
        "engine.library.embedded",
        "    return [prompts] if is_ids else prompts\n",
        "    return prompts\n",
        f"{TESTS}::test_embeddings_equal_the_models_and_have_unit_length",
    ),
    Mutation(
        "llm: embeddings of one engine share an id",
        "engine.library.embedded",
        "            request_id=request_id, inputs=inputs, truncate",
        '            request_id="llm-0", inputs=inputs, truncate',
        f"{TESTS}::test_requests_have_unique_ids",
    ),
    Mutation(
        "llm: logprobs of 0 alternatives are left out",
        "engine.library.openai_format",
        'has_logprobs=params.get("logprobs") is not None)\n',
        'has_logprobs=bool(params.get("logprobs")))\n',
        f"{TESTS}::test_chat_completion_dicts_have_the_same_tokens_and_usage",
    ),
    Mutation(
        "llm: a seed of 64 bits passes",
        "engine.sampling_params",
        "0 <= params.seed < 2**63,",
        "0 <= params.seed < 2**64,",
        f"{SAMPLING_TESTS}::test_sampling_parameters_are_accepted_and_refused_at_their_bounds",
    ),
    Mutation(
        "llm: a negative min_p passes",
        "engine.core.interfaces.request",
        "    min_p: Fraction = 0.0\n",
        "    min_p: Annotated[float, Bound(-INFINITY, 1)] = 0.0\n",
        f"{SAMPLING_TESTS}::test_sampling_parameters_are_accepted_and_refused_at_their_bounds",
    ),
    Mutation(
        "llm: a stop text is read as letters",
        "engine.sampling_params",
        "(value,) if isinstance(value, str) else tuple(value or ())",
        "tuple(value or ())",
        f"{TESTS}::test_stop_takes_a_string_and_include_stop_str_in_output_shows_it",
    ),
    Mutation(
        "llm: alternatives of sampled tokens are shown for a prompt",
        "engine.library.answers",
        "    for rank, each in enumerate(token.top[:most], 1):\n",
        "    for rank, each in enumerate(token.top[:0], 1):\n",
        f"{SAMPLING_TESTS}::test_prompt_logprobs_are_the_models_own",
    ),
    Mutation(
        "llm: deltas repeat the text before",
        "engine.library.answers",
        "                choice.clear()\n",
        "",
        f"{TESTS}::test_an_async_stream_yields_cumulative_delta_or_final_outputs",
    ),
    Mutation(
        "llm: every prompt gets the first one's parameters",
        "engine.llm",
        "    return params\n",
        "    return [params[0]] * count\n",
        f"{TESTS}::test_each_prompt_can_have_its_own_parameters",
    ),
    Mutation(
        "llm: an argument that no engine of ours has is ignored",
        "engine.library.arguments",
        "            if name not in known and value is not None:\n",
        "            if False:\n",
        "tests/unit/library/test_llm_params.py::test_engine_args_map_to_settings_or_are_refused",
    ),
    Mutation(
        "llm: answers in OpenAI's shapes end after 16 tokens",
        "engine.sampling_params",
        'return SamplingParams(**{"max_tokens": None, **fields})',
        "return SamplingParams(**fields)",
        "tests/unit/library/test_llm.py::test_chat_completion_without_max_tokens_fills_the_context",
    ),
]
