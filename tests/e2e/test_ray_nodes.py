"""Nodes in a real Ray cluster of two Ray nodes on this machine: they join, survive, and leave."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.live_server import free_port, wait_until

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"
TOKEN = "a-token-for-the-ray-test"


@pytest.fixture
def cluster(monkeypatch):
    for name in ("raylet_start_wait_time_s", "agent_register_timeout_ms"):
        monkeypatch.setenv(f"RAY_{name}", "300" if name.endswith("_s") else "300000")  # if busy
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    started.add_node(num_cpus=1)
    yield started.address
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def server(tmp_path: Path):
    token, port = tmp_path / "token", free_port()
    token.write_text(TOKEN)
    token.chmod(0o600)
    argv = [sys.executable, "-m", "engine.cli.main", "serve", MODEL, "--backend", "nodes"]
    env = os.environ | {"LLM_ENGINE_SERVER__NODE_TOKEN_FILE": str(token)}
    process = subprocess.Popen([*argv, "--port", str(port)], env=env)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


def nodes_of(url: str) -> list[str]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    try:
        found = httpx.get(f"{url}/v1/admin/nodes", headers=headers).json()["nodes"]
    except httpx.TransportError:
        return []
    return [each["name"] for each in found if each["state"] == "ready"]


def ask(url: str, number: int) -> str:
    body = {"model": MODEL, "prompt": f"Number {number} is", "max_tokens": 48, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    events = [json.loads(each) for each in lines]
    assert not any("error" in each for each in events), events
    return "".join(each["choices"][0]["text"] for each in events if each["choices"])


def test_nodes_of_ray_join_survive_and_leave(cluster, server) -> None:
    from engine.routing.nodes.ray_launcher import NodePlan, RayNodes, connect

    ray = connect(cluster)
    plan = NodePlan(TOKEN, (server, "--model", MODEL, "--threads", "1"))
    nodes = RayNodes(ray, plan)
    nodes.scale_to(2)
    wait_until(lambda: len(nodes_of(server)) == 2, 240)
    alone = [ask(server, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, number) for number in range(8)]
        time.sleep(1.0)
        actor = ray.get_actor(nodes.names()[1], namespace="engine")
        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
        assert [each.result() for each in asked] == alone
    wait_until(lambda: len(nodes_of(server)) == 2, 240)  # Ray has started it again
    nodes.scale_to(0)
    wait_until(lambda: not nodes_of(server), 60)
    assert not nodes.names()
