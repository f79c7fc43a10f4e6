"""What the loss of a node costs in a Ray cluster of two Ray nodes on this machine.

`python -m benchmarks.cluster.ray_nodes` serves the default model with two nodes in Ray, and kills
one (SIGKILL) under 64 streams. No request may fail; the node is ejected; Ray starts it again, and
it is taken back soon after its engine has loaded. Prints one JSON line and exits with 1 if a bar is
missed.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster.nodes import (
    MAX_EJECTION_S,
    MAX_RETURN_S,
    MODEL,
    NUM_STREAMS,
    stream,
    wait_for,
)
from tests.support.servers.ray_cluster import RayServer, node_processes, ray_cluster, ray_server

START_S = 300.0
BEFORE_KILL_S = 3.0


async def kill_under_load(server: RayServer, num_tokens: int) -> tuple[list[Any], float]:
    """The results of the streams, and how soon the killed node was ejected."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {"prompt": f"Tell me about {number}.", "max_tokens": num_tokens, "ignore_eos": True}
        return len([at async for at in stream(client, server.url, body)])

    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        asked = [asyncio.create_task(one(client, each)) for each in range(NUM_STREAMS)]
        await asyncio.sleep(BEFORE_KILL_S)
        os.kill(node_processes("node join")[0].pid, signal.SIGKILL)
        ejected = await asyncio.to_thread(wait_for, lambda: len(server.nodes()) == 1, START_S)
        return list(await asyncio.gather(*asked, return_exceptions=True)), ejected


def logged(words: str) -> list[float]:
    """When nodes have logged this, by Ray's files of their output."""
    logs = Path("/tmp/ray/session_latest/logs")
    lines = [line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines()]
    told = [json.loads(line) for line in lines if words in line and line.startswith("{")]
    return sorted(datetime.fromisoformat(each["ts"]).timestamp() for each in told)


def measure(num_tokens: int) -> dict[str, Any]:
    options = ("--model", MODEL, "--threads", "1", "--min-nodes", "2", "--max-nodes", "2")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address = stack.enter_context(ray_cluster())
        server = stack.enter_context(ray_server(address, Path(folder), MODEL))
        stack.enter_context(server.up(*options, "--log-format", "json"))
        came_s = wait_for(lambda: len(server.nodes()) == 2, START_S)
        answers, ejected_s = asyncio.run(kill_under_load(server, num_tokens))
        wait_for(lambda: len(server.nodes()) == 2, START_S)
        failed = [repr(each) for each in answers if isinstance(each, BaseException)]
        returned_s = logged("Joined ")[-1] - logged("The engine is ready")[-1]
        server.cluster("down")
        left = node_processes("")
    is_good = not failed and not left and returned_s <= MAX_RETURN_S
    return {
        "streams": NUM_STREAMS,
        "two_nodes_after_s": round(came_s, 2),
        "num_failed": len(failed),
        "failed": failed[:3],
        "ejected_s": round(ejected_s, 3),
        "back_after_ready_s": round(returned_s, 3),
        "processes_after_down": len(left),
        "ok": is_good and ejected_s <= MAX_EJECTION_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    figure = measure(parser.parse_args().tokens)
    print(json.dumps({"ray_nodes": figure}))
    return 0 if figure["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
