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
        f"{TESTS}::test_the_engine_runs_in_this_process_with_the_settings_given",
    ),
    Mutation(
        "llm: without parameters an answer has sixteen tokens",
        "engine.sampling_params",
        'SamplingParams(**{"max_tokens": None, **fields})',
        'SamplingParams(**{"max_tokens": 2, **fields})',
        f"{SAMPLING_TESTS}::test_without_parameters_the_context_is_filled",
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
        f"{TESTS}::test_answers_that_end_sooner_do_not_come_sooner",
    ),
    Mutation(
        "llm: the queue's bound counts requests and not choices",
        "engine.library.embedded",
        "max(1, self.max_queued // most)",
        "max(1, self.max_queued)",
        f"{TESTS}::test_no_more_choices_are_asked_for_than_the_queue_takes",
    ),
    Mutation(
        "llm: one conversation is taken for several",
        "engine.llm",
        "        batch: Any = [messages] if single else messages\n",
        "        batch: Any = messages if single else [messages]\n",
        f"{TESTS}::test_one_conversation_is_a_batch_of_one",
    ),
    Mutation(
        "llm: a list of ids is taken for prompts",
        "engine.library.embedded",
        "    return [prompts] if is_ids else prompts\n",
        "    return prompts\n",
        f"{TESTS}::test_vectors_are_the_models_and_of_unit_length",
    ),
    Mutation(
        "llm: embeddings of one engine share an id",
        "engine.library.embedded",
        "            request_id=request_id, inputs=inputs, truncate",
        '            request_id="llm-0", inputs=inputs, truncate',
        f"{TESTS}::test_requests_have_ids_of_their_own",
    ),
    Mutation(
        "llm: logprobs of 0 alternatives are left out",
        "engine.library.openai_format",
        'has_logprobs=params.get("logprobs") is not None)\n',
        'has_logprobs=bool(params.get("logprobs")))\n',
        f"{TESTS}::test_openai_shapes_have_the_same_numbers",
    ),
    Mutation(
        "llm: a seed of 64 bits passes",
        "engine.sampling_params",
        "0 <= params.seed < 2**63,",
        "0 <= params.seed < 2**64,",
        f"{SAMPLING_TESTS}::test_bounds_are_where_they_are_said_to_be",
    ),
    Mutation(
        "llm: a negative min_p passes",
        "engine.core.interfaces.request",
        "    min_p: Fraction = 0.0\n",
        "    min_p: Annotated[float, Bound(-INFINITY, 1)] = 0.0\n",
        f"{SAMPLING_TESTS}::test_bounds_are_where_they_are_said_to_be",
    ),
    Mutation(
        "llm: a stop text is read as letters",
        "engine.sampling_params",
        "(value,) if isinstance(value, str) else tuple(value or ())",
        "tuple(value or ())",
        f"{TESTS}::test_a_text_is_one_stop_string_and_can_be_shown",
    ),
    Mutation(
        "llm: alternatives of sampled tokens are shown for a prompt",
        "engine.library.answers",
        "    for rank, each in enumerate(token.top[:most], 1):\n",
        "    for rank, each in enumerate(token.top[:0], 1):\n",
        f"{SAMPLING_TESTS}::test_logprobs_of_a_prompt_are_the_models",
    ),
    Mutation(
        "llm: deltas repeat the text before",
        "engine.library.answers",
        "                choice.clear()\n",
        "",
        f"{TESTS}::test_an_async_stream_has_the_asked_kind_of_outputs",
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
        "tests/unit/library/test_llm_params.py::test_an_argument_sets_a_setting_or_is_refused",
    ),
    Mutation(
        "llm: answers in OpenAI's shapes end after 16 tokens",
        "engine.sampling_params",
        'return SamplingParams(**{"max_tokens": None, **fields})',
        "return SamplingParams(**fields)",
        "tests/unit/library/test_llm.py::test_openai_shapes_fill_the_context_unless_told",
    ),
]
