"""A Ray cluster of several Ray nodes on this machine, with one CPU each, and nodes in it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil

from tests.support.servers.live_server import free_port
from tests.support.servers.served import ServedEngine, serve

TOKEN = "a-token-for-nodes-in-ray"
# Ray ends its own processes if they start slowly, as they do on a busy machine.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
OBJECT_STORE_BYTES = 100 * 2**20
START_S = 300.0
AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


@contextmanager
def ray_cluster(num_machines: int = 2) -> Iterator[str]:
    """The address of the cluster."""
    os.environ.update(PATIENCE)
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    get_node = services.get_node

    def wait_for_node(*arguments: Any) -> Any:
        """Ray gives a node 30 seconds to register, whatever the settings say."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if _has_dead_raylet() or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    fixed = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster()
    try:
        with mock.patch.object(services, "get_node", wait_for_node):
            for number in range(num_machines):
                # Ports that Ray chooses must be written to files within 30 seconds, too.
                ports = {name: free_port() for name in AGENT_PORTS}
                head = {} if number else {"include_dashboard": False}
                cluster.add_node(**fixed, **ports, **head)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def _has_dead_raylet() -> bool:
    """Whether a Ray node has ended. Ray does this if the node's agents need more than 15 seconds to
    start, which no setting changes.
    """
    children = psutil.Process().children()
    return any(
        each.name() == "raylet" and each.status() == psutil.STATUS_ZOMBIE for each in children
    )


def node_processes(command: str) -> list[psutil.Process]:
    """The processes of the actors' commands, such as `node join`."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        line = " ".join(each.info["cmdline"] or ())
        if f"engine.cli.main {command}" in line and "/fd/" in line:  # their token is in memory
            found.append(each)
    return found


@dataclass
class RayServer:
    """A server without an engine of its own, whose nodes are in a Ray cluster."""

    served: ServedEngine
    address: str  # of the cluster
    token_file: Path

    @property
    def url(self) -> str:
        return self.served.url

    def nodes(self) -> list[str]:
        """Names of the nodes that get requests."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        found = httpx.get(f"{self.url}/v1/admin/nodes", headers=headers, timeout=30).json()["nodes"]
        return sorted(each["name"] for each in found if each["state"] == "ready")

    def cluster(self, command: str, *arguments: str) -> str:
        """The output of `engine cluster COMMAND`."""
        argv = [sys.executable, "-m", "engine.cli.main", "cluster", command, *arguments]
        done = subprocess.run(
            [*argv, "--ray", self.address], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.cluster("status", "--json"))
        return found

    @contextmanager
    def up(self, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        """`engine cluster up`, until the block ends. Its nodes stay."""
        argv = [sys.executable, "-m", "engine.cli.main", "cluster", "up", self.url]
        argv += ["--ray", self.address, "--token-file", str(self.token_file), *arguments]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def ray_server(address: str, folder: Path, model: str) -> Iterator[RayServer]:
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    variables = {"LLM_ENGINE_SERVER__NODE_TOKEN_FILE": str(token_file)}
    with ExitStack() as stack:
        served = stack.enter_context(serve(model, "--backend", "nodes", env=variables))
        yield RayServer(served, address, token_file)
