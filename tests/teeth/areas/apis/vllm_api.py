"""Mutations of vLLM's endpoints and parameters, and of beam search."""

from tests.teeth.mutation import Mutation

TESTS = "tests/unit/servers/test_server_vllm.py"
BEAMS = "tests/unit/library/test_beam_search.py"
MUTATIONS = [
    Mutation(
        "beams are ranked without their prompt",
        "engine.backends.beam_search",
        "(num_prompt + len(self.tokens)) ** penalty",
        "max(1, len(self.tokens)) ** penalty",
        f"{BEAMS}::test_beam_search_with_a_wide_beam_finds_the_best_sequences",
    ),
    Mutation(
        "the end token does not count in a beam",
        "engine.backends.beam_search",
        'Beam(self.score + logprob, self.tokens, "stop")',
        'Beam(self.score, self.tokens, "stop")',
        f"{BEAMS}::test_beam_search_with_a_wide_beam_finds_the_best_sequences",
    ),
    Mutation(
        "a beam search never stops early",
        "engine.backends.beam_search",
        "if rules.early_stopping and",
        "if False and",
        f"{BEAMS}::test_early_stopping_returns_finished_beams",
    ),
    Mutation(
        "alternatives are not bounded",
        "engine.servers.openai.token_fields",
        "if most != ALL and wanted > most:",
        "if False:",
        f"{TESTS}::test_max_logprobs_bounds_the_alternatives",
    ),
    Mutation(
        "the prompt's text is shown with its logprobs",
        "engine.servers.openai.token_fields",
        "and not tokens.shows_prompt",
        "and False",
        f"{TESTS}::test_prompt_logprobs_equal_those_of_an_echo",
    ),
    Mutation(
        "a sleeping server takes requests",
        "engine.servers.vllm_api.sleeping",
        "            services.lifecycle.pause()\n",
        "",
        f"{TESTS}::test_a_sleeping_server_unloads_its_model_and_refuses_requests",
    ),
    Mutation(
        "anyone may send a server to sleep",
        "engine.servers.access.auth",
        '*("/sleep", "/wake_up",',
        '*("/wake_up",',
        f"{TESTS}::test_vllm_admin_routes_need_the_admin_key",
    ),
    Mutation(
        "an invocation loses its body",
        "engine.servers.vllm_api.routes",
        "return Forwarded(app.router, path, msgspec.json.encode(body))",
        "return Forwarded(app.router, path)",
        f"{TESTS}::test_invocations_dispatch_by_their_body",
    ),
]
