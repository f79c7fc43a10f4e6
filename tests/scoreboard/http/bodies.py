"""A minimal valid body for each route, so that a figure can change one thing about it."""

from typing import Any

MESSAGES = [{"role": "user", "content": "say hello"}]


def least_bodies(model: str) -> dict[str, dict[str, Any]]:
    """A minimal body for each path. None takes long to answer."""
    texts = {"model": model, "query": "a", "documents": ["b", "c"]}
    return {**_other_servers(model, texts), **_administration(), **_openai(model, texts)}


def _other_servers(model: str, texts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    text = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    return {
        "/": text,
        "/apply-template": {"messages": MESSAGES},
        "/chat/completions": {"model": model, "messages": MESSAGES, "max_tokens": 1},
        "/chat/completions/input_tokens": {"messages": MESSAGES},
        "/completion": {"prompt": "a", "n_predict": 1},
        "/completions": {"prompt": "a", "n_predict": 1},
        "/detokenize": {"tokens": [1, 2]},
        "/embed": {"inputs": "a"},
        "/embedding": {"content": "a"},
        "/embeddings": {"input": "a"},
        "/api/chat": {"model": model, "messages": MESSAGES, "options": {"num_predict": 1}},
        "/api/copy": {"source": "absent", "destination": "other"},
        "/api/create": {"model": "other", "from": "absent"},
        "/api/embed": {"model": model, "input": "a"},
        "/api/embeddings": {"model": model, "prompt": "a"},
        "/api/generate": {"model": model, "prompt": "a", "options": {"num_predict": 1}},
        "/api/pull": {"model": "absent"},
        "/api/show": {"model": model},
        "/classify": {"model": model, "input": "a"},
        "/openai/deployments/{deployment}/chat/completions": {"messages": MESSAGES},
        "/openai/deployments/{deployment}/completions": {"prompt": "a", "max_tokens": 1},
        "/openai/deployments/{deployment}/embeddings": {"input": "a"},
        "/generate": {"prompt": "a", "max_tokens": 1},
        "/generate_stream": text,
        "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
        "/rerank": texts,
        "/reranking": texts,
        "/responses": {"model": model, "input": "a", "max_output_tokens": 1},
        "/responses/input_tokens": {"model": model, "input": "a"},
        "/invocations": {"model": model, "prompt": "a", "max_tokens": 1},
        "/pooling": {"model": model, "input": "a"},
        "/score": {"model": model, "text_1": "a", "text_2": "b"},
        "/tokenize": {"prompt": "a"},
        **{
            f"/v2/models/{{name}}{version}/{operation}": body
            for version in ("", "/versions/{version}")
            for operation, body in (
                ("infer", {"inputs": [tensor]}),
                ("generate", {"text_input": "a", "max_tokens": 1}),
                ("generate_stream", {"text_input": "a", "max_tokens": 1}),
            )
        },
    }


def _administration() -> dict[str, dict[str, Any]]:
    return {
        "/v1/admin/cache/flush": {},
        "/v1/admin/cache/warm": {"prompts": ["a"]},
        "/v1/admin/drain": {},
        "/v1/admin/requests/{request_id}/replay": {},
        "/v1/admin/keys": {"name": "somebody"},
        "/v1/admin/keys/{name}/limits": {},
        "/v1/admin/limits": {},
        "/v1/admin/log-level": {"level": "info"},
        "/v1/admin/models/load": {"model": "absent"},
        "/v1/load_lora_adapter": {"lora_name": "absent", "lora_path": "/absent"},
        "/v1/unload_lora_adapter": {"lora_name": "absent"},
        "/v1/admin/models/remove": {"id": "absent"},
        "/v1/admin/models/swap": {"id": "absent"},
        "/v1/admin/models/unload": {"id": "absent"},
        "/v1/admin/reload": {},
        "/v1/admin/undrain": {},
    }


def _openai(model: str, texts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "/v1/batches": {
            "input_file_id": "file-absent",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
        "/v1/chat/completions": {"model": model, "messages": MESSAGES, "max_tokens": 1},
        "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
        "/v1/chat/completions/batch": {"model": model, "messages": [MESSAGES], "max_tokens": 1},
        "/v1/chat/completions/{completion_id}": {"metadata": {}},
        "/v1/completions": {"model": model, "prompt": "a", "max_tokens": 1},
        "/v1/conversations": {},
        "/v1/conversations/{conversation_id}": {"metadata": {}},
        "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "a"}]},
        "/v1/embeddings": {"model": model, "input": "a"},
        "/v1/interp/run": {"model": model, "prompt": "a", "interp": {}},
        "/v1/fine_tuning/jobs": {"model": model, "training_file": "file-absent"},
        "/v1/fim/completions": {"model": model, "prompt": "a", "max_tokens": 1},
        "/v1/messages": {"model": model, "messages": MESSAGES, "max_tokens": 1},
        "/v1/messages/batches": {
            "requests": [
                {
                    "custom_id": "a",
                    "params": {"model": model, "messages": MESSAGES, "max_tokens": 1},
                }
            ]
        },
        "/v1/messages/count_tokens": {"model": model, "messages": MESSAGES},
        "/v1/moderations": {"input": "a"},
        "/v1/rerank": texts,
        "/v1/reranking": texts,
        "/v1/responses": {"model": model, "input": "a", "max_output_tokens": 1},
        "/v1/responses/compact": {"model": model, "input": "a"},
        "/v1/responses/input_tokens": {"model": model, "input": "a"},
        "/v1/score": {"model": model, "text_1": "a", "text_2": "b"},
        "/v2/rerank": texts,
        "/v1/uploads": {
            "filename": "a.jsonl",
            "purpose": "batch",
            "bytes": 1,
            "mime_type": "application/jsonl",
        },
        "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_absent"]},
    }
