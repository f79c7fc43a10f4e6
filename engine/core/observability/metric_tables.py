"""The names, help texts and bucket edges of metrics that are alike."""

# Bucket edges in seconds. They are those of vLLM, so that quantiles can be compared. vLLM's edges
# for whole requests start at 0.3 s. A small model may need less, so smaller edges are added.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15),
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)

# A cumulative field of `EngineStats`, the name of the counter that shows it, and the help text of
# the counter.
TOTALS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of admitted sequences"),
    ("prompt_tokens", "engine_prompt_tokens", "Prompt tokens of admitted sequences"),
    ("cached_tokens", "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache"),
    ("generated_tokens", "vllm:generation_tokens", "Tokens sampled"),
    ("generated_tokens", "engine_generated_tokens", "Tokens sampled"),
    ("prefix_queries", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache"),
    ("prefix_queries", "engine_prefix_cache_query_tokens", "Tokens looked up in the prefix cache"),
    ("prefix_hits", "vllm:prefix_cache_hits", "Tokens found in the prefix cache"),
    ("prefix_hits", "engine_prefix_cache_hit_tokens", "Tokens found in the prefix cache"),
    ("num_preemptions", "vllm:num_preemptions", "Sequences preempted because KV blocks ran out"),
    ("num_preemptions", "engine_preemptions", "Sequences preempted because KV blocks ran out"),
    ("num_evictions", "engine_evicted_blocks", "Blocks evicted from the prefix cache"),
    ("num_drafted_tokens", "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified"),
    ("num_drafted_tokens", "engine_drafted_tokens", "Draft tokens that were verified"),
    ("num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens"),
    ("num_accepted_tokens", "engine_accepted_tokens", "Accepted draft tokens"),
    (
        "num_model_drafted_tokens",
        "engine_draft_model_tokens",
        "Draft tokens of the draft model that were verified",
    ),
    (
        "num_model_accepted_tokens",
        "engine_draft_model_accepted_tokens",
        "Accepted draft tokens of the draft model",
    ),
    ("num_nonfinite", "engine_nonfinite_rows", "Failed rows, whose logits were not finite"),
    (
        "num_invariant_failures",
        "engine_invariant_failures",
        "Failed self-checks of KV pool and prefix cache",
    ),
    ("num_steps", "engine_steps", "Engine steps: schedule, forward, sample"),
)

# The histograms of requests, with their help texts and bucket edges.
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time from arrival to the first token", FIRST_TOKEN_S),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time per token of a request, after its first token",
        PER_TOKEN_S,
    ),
    "vllm:e2e_request_latency_seconds": ("Time from arrival to the end", REQUEST_S),
    "vllm:request_queue_time_seconds": ("Time in the queue", REQUEST_S),
    "vllm:request_inference_time_seconds": ("Prefill and decode time", REQUEST_S),
    "vllm:request_prefill_time_seconds": (
        "Time from the first step to the first token",
        REQUEST_S,
    ),
    "vllm:request_decode_time_seconds": ("Time from the first token to the last", REQUEST_S),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "vllm:request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were computed, not found in the cache",
        TOKENS,
    ),
    "vllm:request_generation_tokens": ("Tokens sampled for a request", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Tokens of a request's longest choice", TOKENS),
    "vllm:request_params_n": ("Choices that a request asked for (n)", CHOICES),
    "vllm:request_params_max_tokens": ("Limit that a request asked for (max_tokens)", TOKENS),
}
