"""The tests of vLLM's `tests/entrypoints/openai` that do not apply here, each with its reason.

A name is that of a folder or file, or the beginning of `file::test`. `$` marks a whole name.
"""

INTERNALS = "tests vLLM's own classes, without a server"
LORA = "needs a LoRA adapter"
REASONING = "needs a reasoning model"
TOOLS = "needs a model that was trained to call tools"
ANSWER = "needs a model that knows the answer"
TOKENIZER = "checks numbers of another model's tokenizer"
IMAGES = "needs a model that reads images"
HARMONY = "needs gpt-oss"
ENDS = "needs a model that ends its answer where the test expects it"
LAUNCHER = "starts vLLM itself, or checks its processes"

EXCLUDED = {
    "chat_completion/test_chat_completion_with_prompt_embeds.py": "sends embeddings as a prompt",
    "chat_completion/test_chat_error.py": INTERNALS,
    "chat_completion/test_chat.py::test_chat_completion_request": INTERNALS,
    "chat_completion/test_chat.py::test_complex_message_content": ANSWER,
    "chat_completion/test_chat.py::test_more_than_one_prompt_logprobs_chat": TOKENIZER,
    "chat_completion/test_chat.py::test_response_format_json_object": ANSWER,
    "chat_completion/test_chat.py::test_response_format_json_schema": ANSWER,
    "chat_completion/test_chat.py::test_single_chat_session": TOKENIZER,
    "chat_completion/test_chat.py::test_structured_outputs_json_chat": ENDS,
    "chat_completion/test_completion_with_function_calling.py": TOOLS,
    "chat_completion/test_extra_content_fields.py": IMAGES,
    "chat_completion/test_include_reasoning.py": REASONING,
    "chat_completion/test_logprob_token_ids.py::test_chat_request": INTERNALS,
    "chat_completion/test_logprob_token_ids.py::test_completion_re": INTERNALS,
    "chat_completion/test_logprob_token_ids.py::test_requests_reject": INTERNALS,
    "chat_completion/test_serving_chat.py": INTERNALS,
    "chat_completion/test_thinking_token_budget.py": REASONING,
    "chat_completion/test_thinking_token_budget_validation.py": INTERNALS,
    "completion/test_completion.py::test_completion_request": INTERNALS,
    "completion/test_completion.py::test_completion_streaming": ENDS,
    "completion/test_completion.py::test_single_completion": TOKENIZER,
    "completion/test_completion_error.py": INTERNALS,
    "completion/test_completion_with_prompt_embeds.py": "sends embeddings as a prompt",
    "completion/test_lora_resolvers.py": LORA,
    "completion/test_prompt_validation.py::test_load_prompt_embeds": INTERNALS,
    "completion/test_prompt_validation.py::test_disable_prompt_embeds": INTERNALS,
    "completion/test_shutdown.py::test_shutdown_on_engine_failure": LAUNCHER,
    "completion/test_shutdown.py::test_multi_api_server_shutdown": LAUNCHER,
    "completion/test_tensorizer_entrypoint.py": "needs vLLM's tensorizer",
    "correctness": "needs lm-eval and a model of 1.5 billion parameters",
    "models/test_models.py": LORA,
    "parser": HARMONY,
    "responses/test_basic.py::test_chat$": ANSWER,
    "responses/test_basic.py::test_instructions": ANSWER,
    "responses/test_basic.py::test_simple_input": ANSWER,
    "responses/test_errors.py": INTERNALS,
    "responses/test_function_call.py": TOOLS,
    "responses/test_function_call_parsing.py": INTERNALS,
    "responses/test_harmony.py": HARMONY,
    "responses/test_harmony_utils.py": HARMONY,
    "responses/test_mcp_tools.py": HARMONY,
    "responses/test_namespace_tool_separator.py": TOOLS,
    "responses/test_parsable_context.py": TOOLS,
    "responses/test_parsable_context_unit.py": INTERNALS,
    "responses/test_protocol.py": INTERNALS,
    "responses/test_response_input_to_harmony.py": HARMONY,
    "responses/test_responses_utils.py": INTERNALS,
    "responses/test_sampling_params.py": INTERNALS,
    "responses/test_serving_responses.py": INTERNALS,
    "responses/test_simple.py::test_reasoning_item": REASONING,
    "responses/test_simple.py::test_streaming_reasoning_tokens_e2e": REASONING,
    "responses/test_simple.py::test_non_streaming_reasoning_tokens_e2e": REASONING,
    "responses/test_simple.py::test_streaming_types": REASONING,
    "responses/test_stateful.py::test_previous_response_id": ANSWER,
    "responses/test_stateful.py::test_two_responses_with_same_prev_id": ANSWER,
    "responses/test_streaming_events.py": INTERNALS,
    "responses/test_structured_output.py": ANSWER,
    "test_cli_args.py": INTERNALS,
    "test_dp_supervisor.py": INTERNALS,
    "test_multi_api_servers.py": LAUNCHER,
    "test_openai_schema.py": IMAGES,
    "test_reasoning_enable_thinking.py": INTERNALS,
    "test_render_parity.py": INTERNALS,
    "test_render_token_offsets.py": INTERNALS,
    "test_return_routed_experts.py": "needs a mixture of experts, and tells its experts",
    "test_return_token_ids.py::test_chat_completion_with_tool_use": TOOLS,
    "test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs": ENDS,
    "test_return_tokens_as_ids.py::test_responses_api": INTERNALS,
    "test_run_batch.py": INTERNALS,
    "test_stop_token_ids.py": INTERNALS,
    "test_tool_calls_serialization.py": INTERNALS,
    "test_tool_choice_content_none.py": INTERNALS,
}
# Parts of the names of parametrized tests that do not apply.
EXCLUDED_CASES = {"-lora": LORA, "[lora": LORA}


def reason(name: str) -> str | None:
    """Why a test does not apply. None if it does. `name` starts below vLLM's folder of tests."""
    for each, why in EXCLUDED_CASES.items():
        if each in name:
            return why
    return next((EXCLUDED[each] for each in EXCLUDED if f"{name}$".startswith(each)), None)
