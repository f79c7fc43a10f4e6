"""Mutations of metrics, `engine top`, comparisons and keys."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "compare: an unknown gap is a tie",
        "engine.compare.agreement",
        "not gap.is_bound and ",
        "",
        "tests/unit/test_compare.py::test_a_token_that_is_no_alternative_is_never_a_tie",
    ),
    Mutation(
        "compare: one side's preference is the gap",
        "engine.compare.agreement",
        "Gap(sum(lead.nats for lead in known)",
        "Gap(max(lead.nats for lead in known)",
        "tests/unit/test_compare.py"
        "::test_a_near_tie_is_told_from_a_difference_by_what_both_preferred",
    ),
    Mutation(
        "compare: every ending is the same",
        "engine.compare.agreement",
        "    same_finish = reference.finish_reason == other.finish_reason\n",
        "    same_finish = True\n",
        "tests/unit/test_compare.py"
        "::test_equal_answers_are_identical_and_their_logprobs_are_compared",
    ),
    Mutation(
        "metrics: tokens of one chunk are one",
        "engine.core.observability.metrics",
        "seconds / max(num_tokens, 1)",
        "seconds",
        "tests/unit/test_metrics.py::test_gaps_between_tokens_are_counted_under_both_names",
    ),
    Mutation(
        "top: a new server goes backwards",
        "engine.cli.ops.top_data",
        "return max(grown, 0.0) / elapsed_s",
        "return grown / elapsed_s",
        "tests/unit/test_cli_top.py"
        "::test_rates_are_those_of_the_models_own_backend_and_never_negative",
    ),
    Mutation(
        "top: quantiles begin at zero in every bucket",
        "engine.cli.ops.top_data",
        "(share * total - below) / (count - below)",
        "share * total / count",
        "tests/unit/test_cli_top.py::test_values_are_spread_evenly_within_their_bucket",
    ),
    Mutation(
        "top: backends of one name are one",
        "engine.cli.ops.top_data",
        '                if each["id"] == model and member["name"] == backend:',
        '                if member["name"] == backend:',
        "tests/unit/test_cli_top.py"
        "::test_rates_are_those_of_the_models_own_backend_and_never_negative",
    ),
    Mutation(
        "keys: changing a key's limits loses the others",
        "engine.core.key_file",
        "            _write(path, (*keys[:position], changed, *keys[position + 1 :]))",
        "            _write(path, (*keys[:position], changed))",
        "tests/security/test_keys.py::test_the_file_is_changed_by_name",
    ),
    Mutation(
        "keys: two may have one name",
        "engine.core.key_file",
        '    for field in ("name", "sha256"):',
        '    for field in ("sha256",):',
        "tests/security/test_keys.py::test_two_keys_of_one_name_are_refused",
    ),
    Mutation(
        "compare: a backend that did not run agrees",
        "engine.cli.compare",
        "    if worst < fail_below or any(row.trial.failure is not None for row in rows):\n",
        "    if worst < fail_below:\n",
        "tests/unit/test_compare.py::test_a_backend_that_fails_is_reported_and_the_others_go_on",
    ),
    Mutation(
        "chat: what was cut short is forgotten",
        "engine.cli.talk.session",
        "        except KeyboardInterrupt:\n            events.close()\n",
        "        except KeyboardInterrupt:\n            raise EngineError('cut') from None\n",
        "tests/unit/test_cli_chat.py::test_an_answer_that_was_cut_short_is_part_of_the_conversation",
    ),
    Mutation(
        "keys: a new administrator is a user",
        "engine.cli.ops.keys",
        'role="admin" if admin else "user"',
        'role="user"',
        "tests/security/test_keys.py::test_a_new_key_has_the_role_and_tenant_it_was_made_for",
    ),
    Mutation(
        "config: a key that is not set is hidden",
        "engine.cli.config",
        "        if key in SECRET_KEYS and value is not None:\n",
        "        if key in SECRET_KEYS:\n",
        "tests/unit/test_cli_config.py::test_config_show_lists_every_setting_with_its_origin",
    ),
    Mutation(
        "config: a table's defaults come from the file",
        "engine.cli.config",
        'origin if field in table.model_fields_set else "default"',
        "origin",
        "tests/unit/test_cli_config.py::test_of_a_table_only_what_is_written_comes_from_the_file",
    ),
    Mutation(
        "generate: a dash is a prompt",
        "engine.cli.talk.commands",
        'text = sys.stdin.read() if prompt == "-" else prompt',
        "text = prompt",
        "tests/unit/test_cli_chat.py::test_a_prompt_comes_from_the_line_or_from_standard_input",
    ),
    Mutation(
        "chat: an unknown command is sent to the model",
        "engine.cli.talk.session",
        "        if known not in COMMANDS:\n",
        "        if known not in COMMANDS and self._ask(name) is None:\n",
        "tests/unit/test_terminal.py::test_a_conversation_with_all_its_commands",
    ),
    Mutation(
        "chat: an interrupt loses the draft",
        "engine.cli.talk.session",
        'readline.get_line_buffer() if readline else ""',
        '""',
        "tests/unit/test_terminal.py::test_an_interrupt_keeps_the_draft_and_the_part_of_an_answer",
    ),
    Mutation(
        "markdown: a line may be one column too long",
        "engine.cli.talk.markdown",
        "+ len(shown) > self._width and self._column:",
        "+ len(shown) > self._width + 1 and self._column:",
        "tests/unit/test_cli_chat.py::test_no_word_is_broken_and_no_text_is_lost",
    ),
    Mutation(
        "store: a file of the projector is taken for the model",
        "engine.core.store.hub",
        'and "mmproj" not in name.lower()',
        "",
        "tests/unit/test_pull.py::test_a_repository_of_ggufs_gives_the_wanted_quant",
    ),
    Mutation(
        "store: an incomplete snapshot of the hub's cache is used",
        "engine.core.store.hub",
        "if shards and shards <= names:",
        "if shards:",
        "tests/unit/test_pull.py::test_a_model_in_the_hubs_own_cache_is_found",
    ),
    Mutation(
        "rm: a refusal removes all the same",
        "engine.cli.removal",
        "    if not yes and not _confirmed():\n",
        "    if not yes and _confirmed() is None:\n",
        "tests/unit/test_terminal.py::test_rm_shows_sizes_and_asks",
    ),
    Mutation(
        "bench: failed requests count as answered",
        "engine.cli.ops.bench",
        "[sample for sample in samples if sample.error is None]",
        "list(samples)",
        "tests/unit/test_cli_bench.py::test_failed_requests_count_only_as_failed",
    ),
]
