"""Mutations of the APIs of Ollama, Azure and SGLang."""

from tests.teeth.mutation import Mutation

TEXTS = "tests/unit/servers/test_server_ollama.py"
MODELS = "tests/unit/servers/test_server_ollama_models.py"

MUTATIONS = [
    Mutation(
        "ollama: an answer that was cut ends with stop",
        "engine.servers.ollama.format",
        'end = self._end("length" if is_cut else "stop", usage)',
        'end = self._end("stop", usage)',
        f"{TEXTS}::test_options_are_sampling_parameters",
    ),
    Mutation(
        "ollama: the last tool call of a stream is lost",
        "engine.servers.ollama.format",
        "            return self._end_call()\n        return self._add_to_call(event)",
        '            return b""\n        return self._add_to_call(event)',
        f"{TEXTS}::test_tool_calls_are_sent_whole",
    ),
    Mutation(
        "ollama: results are given to calls in reverse",
        "engine.servers.ollama.messages",
        "call_id = (of_tool or _invented(where, named))[0]",
        "call_id = (of_tool or _invented(where, named))[-1]",
        f"{TEXTS}::test_tool_results_are_matched_to_their_calls",
    ),
    Mutation(
        "ollama: anyone loads models of the store",
        "engine.servers.ollama.names",
        "if found is None and may_administer(request, self._services.keys):",
        "if found is None:",
        f"{MODELS}::test_only_the_admin_may_pull_models",
    ),
    Mutation(
        "ollama: anyone deletes models",
        "engine.servers.access.auth",
        '"/api/delete", "/api/pull"',
        '"/api/pull"',
        f"{MODELS}::test_only_the_admin_may_pull_models",
    ),
    Mutation(
        "ollama: addresses are pulled for anyone",
        "engine.servers.ollama.changes",
        "    if not principal_of(request).is_admin:\n",
        "    if False:\n",
        f"{MODELS}::test_only_the_admin_may_pull_models",
    ),
    Mutation(
        "ollama: a pull goes on without its client",
        "engine.servers.ollama.changes",
        "    finally:\n        report.cancel()\n",
        "    finally:\n        pass\n",
        f"{MODELS}::test_a_client_disconnect_cancels_a_pull",
    ),
    Mutation(
        "ollama: a web page may send JSON as a form",
        "engine.servers.http.limits",
        "not (any_type and not _is_browser(request))",
        "not any_type",
        f"{TEXTS}::test_json_bodies_with_curls_form_content_type_are_accepted",
    ),
    Mutation(
        "ollama: the end of a text is embedded, not its start",
        "engine.servers.ollama.generation",
        "return (*whole[: room - len(after)], *after)",
        "return whole[-room:]",
        f"{TEXTS}::test_long_embedding_inputs_are_truncated_at_their_end",
    ),
    Mutation(
        "on demand: keep_alive lasts for ever",
        "engine.routing.on_demand",
        "        self.is_leaving = True\n        self.keep_s = None\n",
        "        self.is_leaving = True\n",
        f"{MODELS}::test_keep_alive_0_unloads_the_model",
    ),
    Mutation(
        "azure: the body names the model, not the path",
        "engine.servers.serving.services",
        "        name, principal = request.scope.get(DEPLOYMENT, name), principal_of(request)\n",
        "        principal = principal_of(request)\n",
        "tests/unit/servers/test_server_azure.py::test_the_azure_deployment_is_the_model",
    ),
    Mutation(
        "sglang: the echoed prompt is part of the answer",
        "engine.servers.sglang_api.generate",
        "            if event.logprobs and not event.num_tokens:\n",
        "            if False:\n",
        "tests/unit/servers/test_server_sglang.py::test_sglang_logprobs_are_returned_if_requested",
    ),
    Mutation(
        "sglang: each event has only the new text",
        "engine.servers.sglang_api.generate",
        "self.text += event.text",
        "self.text = event.text",
        "tests/unit/servers/test_server_sglang.py::test_sglang_streams_repeat_the_text_so_far",
    ),
    Mutation(
        "sglang: the health check never computes",
        "engine.servers.sglang_api.routes",
        "            if not services.lifecycle.pumps:\n",
        "            if False:\n",
        "tests/unit/servers/test_server_sglang.py::test_health_generate_needs_a_generated_token",
    ),
    Mutation(
        "ollama: an empty line keeps the connection alive",
        "engine.servers.serving.sse",
        '    keep_alive = b" "',
        '    keep_alive = b"\\n"',
        f"{TEXTS}::test_every_line_is_json_while_the_prompt_is_computed",
    ),
]
