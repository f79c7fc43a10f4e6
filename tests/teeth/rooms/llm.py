"""Mistakes in the Python API."""

from tests.teeth.mutation import Mutation

TESTS = "tests/unit/test_llm.py"

MUTATIONS = [
    Mutation(
        "llm: settings that are given are not used",
        "engine.llm",
        '{"model.model_path": model, **(settings or {})}',
        '{"model.model_path": model}',
        f"{TESTS}::test_the_engine_runs_in_this_process_with_the_settings_given",
    ),
    Mutation(
        "llm: without parameters an answer has sixteen tokens",
        "engine.llm",
        "        params = params or SamplingParams(max_tokens=None)\n",
        "        params = params or SamplingParams(max_tokens=2)\n",
        f"{TESTS}::test_without_parameters_the_context_is_filled",
    ),
    Mutation(
        "llm: choices beyond the first are lost",
        "engine.llm",
        "    collected = Collected(1 + max(event.choice for event in seen))\n",
        "    collected = Collected(1)\n",
        f"{TESTS}::test_choices_are_numbered_and_counted",
    ),
    Mutation(
        "llm: token ids of all choices are mixed",
        "engine.llm",
        "if isinstance(event, TextEvent) and event.choice == index]",
        "if isinstance(event, TextEvent)]",
        f"{TESTS}::test_choices_are_numbered_and_counted",
    ),
    Mutation(
        "llm: answers come in the order in which they end",
        "engine.llm",
        "                return await asyncio.gather(*tasks)\n",
        "                return [await each for each in asyncio.as_completed(tasks[::-1])]\n",
        f"{TESTS}::test_answers_that_end_sooner_do_not_come_sooner",
    ),
    Mutation(
        "llm: the queue's bound counts requests and not choices",
        "engine.llm",
        "max(1, self._max_queued // (params.n if params else 1))",
        "max(1, self._max_queued)",
        f"{TESTS}::test_no_more_choices_are_asked_for_than_the_queue_takes",
    ),
    Mutation(
        "llm: one conversation is taken for several",
        "engine.llm",
        "        batch: Any = [conversations] if single else conversations\n",
        "        batch: Any = conversations if single else [conversations]\n",
        f"{TESTS}::test_one_conversation_is_a_batch_of_one",
    ),
    Mutation(
        "llm: a list of ids is taken for prompts",
        "engine.llm",
        "isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))",
        "isinstance(prompts, str)",
        f"{TESTS}::test_vectors_are_the_models_and_of_unit_length",
    ),
    Mutation(
        "llm: embeddings of one engine share an id",
        "engine.llm",
        'EmbedRequest(request_id=f"llm-{next(self._ids)}", inputs=texts)',
        'EmbedRequest(request_id="llm-0", inputs=texts)',
        f"{TESTS}::test_requests_have_ids_of_their_own",
    ),
    Mutation(
        "llm: logprobs of 0 alternatives are left out",
        "engine.llm",
        '        with_logprobs = params.get("logprobs") is not None\n',
        '        with_logprobs = bool(params.get("logprobs"))\n',
        f"{TESTS}::test_openai_shapes_have_the_same_numbers",
    ),
    Mutation(
        "llm: a seed of 64 bits passes",
        "engine.llm",
        "0 <= params.seed < 2**63,",
        "0 <= params.seed < 2**64,",
        f"{TESTS}::test_bounds_are_where_they_are_said_to_be",
    ),
    Mutation(
        "llm: a negative min_p passes",
        "engine.llm",
        '"0 <= min_p <= 1": 0 <= params.min_p <= 1,',
        '"0 <= min_p <= 1": params.min_p <= 1,',
        f"{TESTS}::test_bounds_are_where_they_are_said_to_be",
    ),
    Mutation(
        "llm: a parameter that nobody would see is taken",
        "engine.llm",
        '        "score_prompt is false": not params.score_prompt,\n',
        "",
        f"{TESTS}::test_scores_of_a_prompt_are_refused_where_nobody_would_see_them",
    ),
]
