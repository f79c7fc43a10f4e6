"""A rank of a sharded server dies under live streams: every stream ends whole."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.files.checkpoint_folders import write_hf
from tests.support.servers.live_server import events_of
from tests.support.servers.node_processes import READY, running

NUM_STREAMS = 8
NUM_TOKENS = 300
RANK_MODULE = "engine.torch.execution.distributed.rank"


def rank_pids(server: int) -> list[int]:
    children = psutil.Process(server).children(recursive=True)
    return [each.pid for each in children if RANK_MODULE in each.cmdline()]


def stream(url: str, number: int, began: threading.Semaphore, found: dict[int, Any]) -> None:
    body = {"model": "tiny", "prompt": f"{number} " * 40, "max_tokens": NUM_TOKENS}
    body |= {"seed": number, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    reason, num_tokens = None, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            for event in events_of(line + "\n\n") if line.startswith("data: {") else ():
                assert "error" not in event, event
                if event["choices"]:
                    reason = event["choices"][0]["finish_reason"]
                    began.release()
                else:
                    num_tokens = event["usage"]["completion_tokens"]
    found[number] = reason, num_tokens


def streams(url: str, pid: int) -> dict[int, Any]:
    """How all streams ended. A rank of the server `pid` is killed when they have begun."""
    found: dict[int, Any] = {}
    began = threading.Semaphore(0)
    threads = [
        threading.Thread(target=stream, args=(url, number, began, found))
        for number in range(NUM_STREAMS)
    ]
    for each in threads:
        each.start()
    for _ in range(4 * NUM_STREAMS):
        assert began.acquire(timeout=120)
    os.kill(rank_pids(pid)[-1], signal.SIGKILL)
    for each in threads:
        each.join(300)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_streams_survive_the_death_of_a_rank(tmp_path: Path) -> None:
    write_hf(tmp_path / "tiny", "llama", spread=0.2, max_position=1024)
    words = ("serve", str(tmp_path / "tiny"), "--backend", "torch", "--device", "cpu", "-tp", "2")
    with running(*words, "--dtype", "float32", "--port", "0", "--name", "tiny") as server:
        url = server.told(READY, 300)[1]
        assert len(rank_pids(server.process.pid)) == 2
        found = streams(url, server.process.pid)
        assert list(found.values()) == [("length", NUM_TOKENS)] * NUM_STREAMS
        text = httpx.get(f"{url}/metrics").text
        (revived,) = re.findall(r"^engine_revived_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert float(revived) == NUM_STREAMS
