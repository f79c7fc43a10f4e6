"""The tests that can't apply here, by name and reason. A name is a file, a test, or one case of a
test, as pytest writes it; `*` stands for any characters.

Tests of features that this server lacks are not excluded: they run and fail.
"""

from fnmatch import fnmatchcase

_TEXT = "checks texts that stories260K writes; this model is not available here"
_COUNT = "checks token counts of stories260K's vocabulary; this model is not available here"
_LORA = "needs LoRA adapters from the hub"
_MCP = "is about MCP servers that llama.cpp's server starts"
_ROUTER = "is about llama.cpp's router, which gets models from the hub"
_CORS = "is about the CORS rules of llama.cpp's router"
_UI = "is about llama.cpp's web pages"
_TOOLS = "is about tools that llama.cpp's server runs itself: a shell, files"
_PROXY = "is about a proxy in llama.cpp's server"
_VISION = "needs tinygemma3, a vision model from the hub, or images on the web"
_SLOTS = "is about files to which llama.cpp writes the cache of a slot"
_SHIFT = "is about context shift, which drops tokens of a full context"
_DRAFT = "needs a draft model from the hub"
_LOG = "checks the texts of llama.cpp's log"
_GCP = "is about the mode for Google Cloud that an environment variable turns on"
_RANK = "checks scores or token counts of jina-reranker, which is not available here"
_SKIPPED = "is skipped by its authors"

EXCLUDED = {
    "unit/test_basic.py::test_load_split_model": "needs a split model from the hub",
    "unit/test_basic.py::test_no_ui": _UI,
    "unit/test_chat_completion.py::test_chat_completion[*": _TEXT,
    "unit/test_chat_completion.py::test_chat_completion_cached_tokens": _COUNT,
    "unit/test_chat_completion.py::test_chat_completion_stream[*": _TEXT,
    "unit/test_chat_completion.py::test_chat_completion_with_openai_library": _TEXT,
    "unit/test_compat_anthropic.py::test_anthropic_tool_result_with_image": _VISION,
    "unit/test_compat_anthropic.py::test_anthropic_vision_*": _VISION,
    "unit/test_compat_gcp.py": _GCP,
    "unit/test_compat_oai_responses.py::test_responses_with_openai_library": _TEXT,
    "unit/test_compat_oai_responses.py::test_responses_stream_with_openai_library": _TEXT,
    "unit/test_completion.py::test_cache_vs_nocache_prompt": _SKIPPED,
    "unit/test_completion.py::test_completion[*": _TEXT,
    "unit/test_completion.py::test_completion_prompt_cache": _COUNT,
    "unit/test_completion.py::test_completion_stream[*": _TEXT,
    "unit/test_completion.py::test_completion_with_openai_library": _TEXT,
    "unit/test_completion.py::test_completion_stream_with_openai_library*": _TEXT,
    "unit/test_completion.py::test_nocache_long_input_prompt": _COUNT,
    "unit/test_ctx_shift.py::test_ctx_shift_disabled_long_prompt": _COUNT,
    "unit/test_ctx_shift.py::test_ctx_shift_disabled_short_prompt[-1-248-True]": _COUNT,
    "unit/test_ctx_shift.py::test_ctx_shift_enabled": _SHIFT,
    "unit/test_infill.py::test_infill_*": _TEXT,
    "unit/test_infill.py::test_with_qwen_model": _SKIPPED,
    "unit/test_kv_keep_only_active.py": _LOG,
    "unit/test_lora.py": _LORA,
    "unit/test_mcp_servers.py": _MCP,
    "unit/test_proxy.py": _PROXY,
    "unit/test_rerank.py::test_rerank": _RANK,
    "unit/test_rerank.py::test_rerank_tei_format": _RANK,
    "unit/test_rerank.py::test_rerank_usage*": _RANK,
    "unit/test_router.py": _ROUTER,
    "unit/test_security.py::test_access_static_assets_without_api_key": _UI,
    "unit/test_security.py::test_cors_origins_*": _CORS,
    "unit/test_security.py::test_cors_proxy_only_forwards_explicit_proxy_headers": _PROXY,
    "unit/test_security.py::test_local_media_file*": _VISION,
    "unit/test_slot_save.py": _SLOTS,
    "unit/test_speculative.py": _DRAFT,
    "unit/test_stream.py": _ROUTER,
    "unit/test_tools_builtin.py": _TOOLS,
    "unit/test_vision_api.py": _VISION,
}


def reason_against(name: str) -> str | None:
    """Why the test with this name is excluded. None if it is not."""
    for pattern, reason in EXCLUDED.items():
        # fnmatch would read brackets as sets of characters.
        escaped = pattern.replace("[", "[[]")
        if fnmatchcase(name, escaped) or name.startswith(f"{pattern}::"):
            return reason
    return None
