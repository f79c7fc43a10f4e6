"""`engine serve --backend transformers` as a user runs it, on a family that we don't have."""

import json
import os
import signal
import threading

import httpx
import psutil
import pytest
import transformers

from tests.support.files.tokenizer_files import write_directory
from tests.support.servers.served import ServedEngine, serve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny-neox"
    config = transformers.GPTNeoXConfig(
        vocab_size=560,  # a few more than the tokenizer has
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(path)
    return str(write_directory(path))


def chat(server: ServedEngine, **extra) -> httpx.Response:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "max_tokens": 8,
        **extra,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def engine_pid(server: ServedEngine) -> int:
    """Beside it, the server may have a child that tries grammars."""
    children = psutil.Process(server.process.pid).children()
    (pid,) = [
        each.pid for each in children if "engine.backends.transformers.worker" in each.cmdline()
    ]
    return pid


def stream_to_its_end(server: ServedEngine, ends: list[str]) -> None:
    body = {"model": server.model, "prompt": "the fox", "max_tokens": 1000, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60
    ) as reply:
        ends.append([line for line in reply.iter_lines() if line][-1])


def test_a_transformers_model_is_served_and_survives_kill_9(checkpoint):
    with serve(checkpoint, "--backend", "transformers", "--threads", "1") as server:
        card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("tiny-neox", 4096)
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        reply = chat(server, response_format=wanted, logprobs=True, seed=1, max_tokens=20).json()
        assert json.loads(reply["choices"][0]["message"]["content"])["n"] in (1, 2)
        assert reply["choices"][0]["logprobs"]["content"]

        pid, ends = engine_pid(server), []
        readers = [
            threading.Thread(target=stream_to_its_end, args=(server, ends)) for _ in range(8)
        ]
        for reader in readers:
            reader.start()
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
        os.kill(pid, signal.SIGKILL)
        for reader in readers:
            reader.join(timeout=60)
        assert len(ends) == 8 and all(end == "data: [DONE]" for end in ends), ends

        server.wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, 60)
        assert chat(server).status_code == 200
        pid = engine_pid(server)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.wait_until(lambda: not psutil.pid_exists(pid))
