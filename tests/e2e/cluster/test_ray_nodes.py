"""Nodes in a real Ray cluster of two Ray nodes on this machine: they come with the load, survive,
and leave. `make test-slow` runs it; each test takes about a minute.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import DEFAULT_MODEL
from tests.support.files.checkpoint_folders import write_hf
from tests.support.servers.live_server import wait_until
from tests.support.servers.ray_cluster import RayServer, node_processes, ray_cluster, ray_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STREAMS = 8
START_S = 240.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("ray")
    with ray_cluster() as found:
        yield found


async def stream(client: httpx.AsyncClient, model: str, number: int) -> str:
    body = {"model": model, "prompt": f"Number {number} is", "max_tokens": 32, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(each["text"] for each in event["choices"])
            ended = ended or line == "data: [DONE]"
    assert ended
    return text


def texts(server: RayServer, model: str = DEFAULT_MODEL, kill: int | None = None) -> list[str]:
    """Answers to several requests at once. `kill` is a process that dies while they run."""

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=START_S) as client:
            tasks = [stream(client, model, number) for number in range(NUM_STREAMS)]
            running = asyncio.gather(*tasks)
            if kill is not None:
                await asyncio.sleep(0.5)
                os.kill(kill, signal.SIGKILL)
            return list(await running)

    return asyncio.run(ask())


def nothing_is_left(server: RayServer) -> bool:
    return not server.nodes() and not server.status() and not node_processes("")


def test_nodes_follow_the_queue_and_survive_kills(address: str, tmp_path: Path) -> None:
    options = ("--model", DEFAULT_MODEL, "--threads", "1", "--max-nodes", "2", "--per-node", "4")
    serving = ray_server(address, tmp_path, DEFAULT_MODEL)
    with serving as server, server.up(*options, "--patience", "20"):
        first = texts(server)  # there was no node yet: the requests waited
        wait_until(lambda: len(server.nodes()) == 2, START_S)
        assert {each["state"] for each in server.status()} == {"placed"}
        assert texts(server, kill=node_processes("node join")[0].pid) == first
        wait_until(lambda: len(server.nodes()) == 2, START_S)  # Ray has started it again
        actor = node_processes("node join")[0].parent()
        assert actor is not None and "NodeProcess" in " ".join(actor.cmdline())
        assert texts(server, kill=actor.pid) == first
        wait_until(lambda: not server.nodes(), START_S)  # nobody asks any more
        wait_until(lambda: nothing_is_left(server), START_S)


def test_the_ranks_of_a_node_are_on_several_machines(address: str, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_hf(model, "llama")
    options = ("--model", str(model), "--min-nodes", "1", "-tp", "2", "--backend", "torch")
    with ray_server(address, tmp_path, str(model)) as server:
        with server.up(*options, "--device", "cpu", "--dtype", "float32"):
            wait_until(lambda: len(server.nodes()) == 1, START_S)
            (node,) = server.status()
            assert node["ranks"] == 2
            name = server.served.model
            first = texts(server, name)
            assert texts(server, name, kill=node_processes("shard")[0].pid) == first
            assert texts(server, name, kill=node_processes("node join")[0].pid) == first
        assert "1 nodes left" in server.cluster("down")
        wait_until(lambda: nothing_is_left(server), 60)


def test_cluster_up_reports_bad_options_and_missing_resources(address: str, tmp_path: Path) -> None:
    with ray_server(address, tmp_path, DEFAULT_MODEL) as server:
        with server.up("--min-nodes", "1", "--no-such-option") as scaling:
            assert "No such option" in heard(scaling, "failed")
        server.cluster("down")
        options = ("--min-nodes", "1", "--num-cpus", "64", "--model", DEFAULT_MODEL)
        with server.up(*options) as scaling:
            assert "64 CPU each" in heard(scaling, "no room")
            assert [each["state"] for each in server.status()] == ["waiting for room"]
        server.cluster("down")
        assert nothing_is_left(server)


def heard(process: "subprocess.Popen[str]", words: str) -> str:
    """The first line of a process's messages that has these words."""
    assert process.stderr is not None
    deadline = time.monotonic() + START_S
    for line in process.stderr:
        if words in line:
            return line
        assert time.monotonic() < deadline
    raise AssertionError(f"it ended and never said {words}")
