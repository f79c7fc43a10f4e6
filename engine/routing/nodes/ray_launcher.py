"""Runs nodes as actors of a Ray cluster, and changes their number with the queue.

Ray places the actors, one bundle each, and restarts those that die. An actor runs `engine node
join` as a child process, so tokens go over the node's own connection and never through Ray.
"""

import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)

NAMESPACE = "engine"
PLACEMENT_TIMEOUT_S = 60.0
POLL_S = 1.0
PREFIX = "engine-node-"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What each actor needs, and which command it runs."""

    token: str
    arguments: tuple[str, ...]  # of `engine node join`, without the token
    num_cpus: float = 1.0
    num_gpus: float = 0.0


def connect(address: str) -> Any:
    """Connect to a Ray cluster. Raises an error that says what to do."""
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed; run: pip install 'engine[ray]'") from None
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, ignore_reinit_error=True
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnavailableError(f"No Ray cluster answers at {address}: {first}") from None
    return ray


class NodeProcess:
    """The body of an actor: a node in a child process. If the child ends, so does the actor, and
    Ray starts it again.
    """

    def __init__(self, token: str, arguments: list[str], name: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="engine-node-"))
        path = folder / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        argv = [sys.executable, "-m", "engine.cli.main", "node", "join", *arguments]
        self._process = subprocess.Popen([*argv, "--token-file", str(path), "--name", name])

    def watch(self) -> None:
        """Wait until the child ends. Ends the actor's process if the child failed."""
        if self._process.wait() != 0:
            os._exit(1)

    def pid(self) -> int:
        return self._process.pid

    def leave(self) -> None:
        """Let open requests finish, then end."""
        self._process.terminate()
        self._process.wait()


class RayNodes:
    """The nodes that a plan has started in a cluster. They outlive this process."""

    def __init__(self, ray: Any, plan: NodePlan) -> None:
        self._ray = ray
        self._plan = plan

    def names(self) -> list[str]:
        """Names of the actors that run or are being restarted."""
        found = self._ray.util.list_named_actors(all_namespaces=True)
        names = (each["name"] for each in found if each["namespace"] == NAMESPACE)
        return sorted(each for each in names if each.startswith(PREFIX))

    def scale_to(self, count: int) -> None:
        """Start nodes, or let the newest ones leave."""
        names = self.names()
        for name in reversed(names[count:]):
            self.stop(name)
        numbered = (f"{PREFIX}{number:04d}" for number in range(count + len(names)))
        free = [name for name in numbered if name not in names]
        for name in free[: max(0, count - len(names))]:
            self._start(name)

    def stop(self, name: str) -> None:
        ray = self._ray
        actor = ray.get_actor(name, namespace=NAMESPACE)
        try:
            ray.get(actor.leave.remote(), timeout=PLACEMENT_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            log.warning("%s did not leave in time; it is killed", name)
        ray.kill(actor, no_restart=True)
        for group in self._groups(name):
            ray.util.remove_placement_group(group)

    def _groups(self, name: str) -> list[Any]:
        try:
            return [self._ray.util.get_placement_group(name)]
        except ValueError:
            return []

    def _start(self, name: str) -> None:
        ray, plan = self._ray, self._plan
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": plan.num_cpus} | ({"GPU": plan.num_gpus} if plan.num_gpus else {})
        group = ray.util.placement_group([bundle], name=name, lifetime="detached")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            ray.util.remove_placement_group(group)
            raise UnavailableError(
                f"The Ray cluster has no room for a node with {bundle}; add machines, or ask for"
                " less with --num-cpus and --num-gpus."
            )
        kind = ray.remote(NodeProcess).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=plan.num_cpus,
            num_gpus=plan.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
        )
        actor = kind.remote(plan.token, list(plan.arguments), name)
        ray.get(actor.pid.remote(), timeout=PLACEMENT_TIMEOUT_S)
        actor.watch.remote()


@dataclass(slots=True)
class Autoscaler:
    """How many nodes there should be, from the number of open requests. More are started at once,
    fewer only after the load was low for `patience_s`.
    """

    min_nodes: int
    max_nodes: int
    per_node: int  # open requests for which one node is enough
    patience_s: float = 60.0
    _low_since: float | None = None

    def wanted(self, num_nodes: int, num_open: int, now: float) -> int:
        target = -(-num_open // self.per_node)
        target = max(self.min_nodes, min(self.max_nodes, target))
        if target >= num_nodes:
            self._low_since = None
            return target
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < self.patience_s:
            return num_nodes
        self._low_since = now
        return target


def keep_scaled(nodes: RayNodes, scaler: Autoscaler, count_open: Any, stop: Any) -> None:
    """Change the number of nodes until `stop()` is true. `count_open` asks the server."""
    while not stop():
        here = len(nodes.names())
        wanted = scaler.wanted(here, count_open(), time.monotonic())
        if wanted != here:
            log.info("%d nodes instead of %d", wanted, here)
            nodes.scale_to(wanted)
        time.sleep(POLL_S)
