"""Mutations of llama.cpp's endpoints."""

from tests.teeth.mutation import Mutation

TESTS = "tests/unit/servers/test_server_llamacpp.py"

MUTATIONS = [
    Mutation(
        "an answer that does not fit the context is refused",
        "engine.servers.llamacpp.schema",
        "            limit = min(limit, max(room, 1))\n",
        "            pass\n",
        f"{TESTS}::test_an_answer_ends_at_the_context_length",
    ),
    Mutation(
        "every text of a prompt gets a BOS",
        "engine.servers.llamacpp.completion",
        "add_special_tokens=position == 0, parse_special=True",
        "add_special_tokens=True, parse_special=True",
        f"{TESTS}::test_llamacpp_prompts_may_be_texts_ids_and_mixtures",
    ),
    Mutation(
        "a prompt without the cache finds cached prefixes",
        "engine.servers.serving.generation",
        "salt = UNSHARED + secrets.token_hex(16)",
        "salt = UNSHARED",
        f"{TESTS}::test_cache_prompt_false_skips_the_prefix_cache",
    ),
    Mutation(
        "each prompt tells the usage of all",
        "engine.servers.llamacpp.format",
        "usages[index // asked.num_choices] if usages else pump.usage",
        "pump.usage",
        f"{TESTS}::test_llamacpp_prompts_may_be_texts_ids_and_mixtures",
    ),
    Mutation(
        "the template's BOS is there twice",
        "engine.servers.llamacpp.text",
        "            ids = ids[len(added) :]\n",
        "            pass\n",
        f"{TESTS}::test_apply_template_adds_no_bos",
    ),
    Mutation(
        "slots are busy after the end of a sequence",
        "engine.servers.llamacpp.state",
        "        if pump.failure is not None or pump.finish_reasons[choice] is not None:\n",
        "        if pump.failure is not None:\n",
        f"{TESTS}::test_slots_show_a_running_sequence",
    ),
]
