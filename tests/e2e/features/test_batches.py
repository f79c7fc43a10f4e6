"""A batch on the real model, through two servers: the first is killed in the middle of it."""

import json
import os
import signal
from pathlib import Path

import openai
import pytest

from tests.support.servers.served import ServedEngine, serve

NUM_LINES = 24
MODEL = "smollm2-135m-instruct"


def client_of(server: ServedEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def request(model: str, number: int) -> dict:
    question = f"Say the number {number} and nothing else."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 8,
    }
    url = "/v1/chat/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


@pytest.mark.timeout(400)  # two servers are started, on whatever machine this is
def test_a_batch_survives_kill_9_with_every_line_answered_once(
    default_model: Path, tmp_path: Path
) -> None:
    env = {"LLM_ENGINE_STORAGE__PATH": str(tmp_path)}
    with serve(MODEL, env=env) as server, client_of(server) as client:
        lines = [json.dumps(request(server.model, n)) for n in range(NUM_LINES)]
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        server.wait_until(
            lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 120
        )
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
    with serve(MODEL, env=env) as server, client_of(server) as client:
        server.wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", 120)
        batch = client.batches.retrieve(batch_id)
        assert batch.request_counts.completed == NUM_LINES and batch.error_file_id is None
        output = client.files.content(batch.output_file_id).text
        answers = [json.loads(each) for each in output.splitlines()]
        assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(NUM_LINES)]
        for each in answers:
            choice = each["response"]["body"]["choices"][0]
            assert choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")
        # Only what the first server had not finished was computed here.
        assert server.metric("engine_requests_total") < NUM_LINES
