"""What the loss of a node costs in a Ray cluster of two Ray nodes on this machine.

`python -m benchmarks.ray_nodes` serves the default model with two nodes in Ray, and kills one
(SIGKILL) under 64 streams. No request may fail; the node is ejected; Ray starts it again, and it is
taken back soon after its engine has loaded. Prints one JSON line and exits with 1 if a bar is
missed.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import (
    MAX_EJECTION_S,
    MAX_RETURN_S,
    MODEL,
    NUM_STREAMS,
    stream,
    wait_for,
)
from tests.ray_cluster import RayServer, node_processes, ray_cluster, ray_server

START_S = 300.0
BEFORE_KILL_S = 3.0


async def kill_under_load(server: RayServer, num_tokens: int) -> tuple[list[Any], float, float]:
    """The results of the streams, when the node was ejected, and when it was back."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {"prompt": f"Tell me about {number}.", "max_tokens": num_tokens, "ignore_eos": True}
        return len([at async for at in stream(client, server.url, body)])

    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        asked = [asyncio.create_task(one(client, each)) for each in range(NUM_STREAMS)]
        await asyncio.sleep(BEFORE_KILL_S)
        os.kill(node_processes("node join")[0].pid, signal.SIGKILL)
        ejected = await asyncio.to_thread(wait_for, lambda: len(server.nodes()) == 1, START_S)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return list(answers), ejected, time.monotonic()


def measure(num_tokens: int) -> dict[str, Any]:
    options = ("--model", MODEL, "--threads", "1", "--min-nodes", "2", "--max-nodes", "2")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address = stack.enter_context(ray_cluster())
        server = stack.enter_context(ray_server(address, Path(folder), MODEL))
        stack.enter_context(server.up(*options))
        came_s = wait_for(lambda: len(server.nodes()) == 2, START_S)
        answers, ejected_s, _ = asyncio.run(kill_under_load(server, num_tokens))
        wait_for(lambda: len(server.nodes()) == 2, START_S)
        failed = [repr(each) for each in answers if isinstance(each, BaseException)]
        server.cluster("down")
    return {
        "streams": NUM_STREAMS,
        "two_nodes_after_s": round(came_s, 2),
        "num_failed": len(failed),
        "failed": failed[:3],
        "ejected_s": round(ejected_s, 3),
        "ok": not failed and ejected_s <= MAX_EJECTION_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    figure = measure(parser.parse_args().tokens)
    print(json.dumps({"ray_nodes": figure}))
    return 0 if figure["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
