"""Starts nodes in a Ray cluster, and lets them leave.

A node has a placement group of its own, with a bundle and an actor for each of its ranks.
"""

import contextlib
import logging
import socket
import time
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError, UnavailableError
from engine.routing.ray_nodes.actors import NodeProcess, ShardProcess

log = logging.getLogger(__name__)

PREFIX = "engine-node-"
RANK = ".rank"  # in the name of an actor: a rank other than the first
CONNECT_S = 10.0
ANSWER_S = 1.0  # how long a call of an actor may take
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What each node needs, and which command it runs."""

    token: str
    arguments: tuple[str, ...]  # of `engine node join`, without the token and the model
    model: str | None = None
    num_cpus: float = 1.0  # for each rank
    num_gpus: float = 0.0
    num_ranks: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a rank."""
        return {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})

    @property
    def model_option(self) -> list[str]:
        return [] if self.model is None else ["--model", self.model]


def connect(address: str, namespace: str) -> Any:
    """Connect to a Ray cluster. Raises an error that says what to do."""
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed; run: pip install 'engine[ray]'") from None
    _check_reachable(address)
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            ignore_reinit_error=True,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnavailableError(f"No Ray cluster answers at {address}: {first}") from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise an error if nothing listens at HOST:PORT. Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or another form that only Ray knows
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"No Ray cluster answers at {address}: {error}") from None


class RayNodes:
    """The nodes in one namespace of a Ray cluster. They outlive this process."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        # Ray lists the placement groups of all namespaces, so their names have the namespace.
        self._group_prefix = f"{ray.get_runtime_context().namespace}/"
        self._leaving: set[str] = set()

    def names(self) -> list[str]:
        """Names of the nodes that run, wait for room or are being restarted."""
        return [each for each in self._all_names() if each not in self._leaving]

    def waiting(self) -> list[str]:
        """Names of the nodes for which the cluster has no room yet."""
        groups = self._groups()
        return [each for each in self.names() if _state(groups.get(each)) != "CREATED"]

    def describe(self) -> list[dict[str, Any]]:
        """Name, state and machines of each node."""
        groups, failures = self._groups(), self.failures()
        machines = {each["NodeID"]: each["NodeManagerAddress"] for each in self._ray.nodes()}
        found = []
        for name in self._all_names():
            places = groups.get(name, {}).get("bundles_to_node_id", {})
            is_placed = _state(groups.get(name)) == "CREATED"
            found.append(
                {
                    "name": name,
                    "state": "placed" if is_placed else "waiting for room",
                    "machines": sorted({machines[each] for each in places.values() if each}),
                    "ranks": len(places),
                    "failure": failures.get(name, ""),
                }
            )
        return found

    def failures(self) -> dict[str, str]:
        """What the nodes say whose commands fail at their start, by name."""
        ray = self._ray
        asked = {}
        for name in self._actor_names():
            with contextlib.suppress(ValueError):  # it has just gone
                asked[ray.get_actor(name).failure.remote()] = name.partition(RANK)[0]
        if not asked:
            return {}
        # An actor that waits for free resources or is being restarted does not answer.
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        found = {}
        for each in done:
            try:
                text = ray.get(each)
            except ray.exceptions.RayError:
                continue
            if text:
                found[asked[each]] = text
        return found

    def scale_to(self, count: int, plan: NodePlan) -> None:
        """Start nodes, or let some leave: first those that wait for free resources, then the
        newest.
        """
        names, waiting = self.names(), set(self.waiting())
        kept_first = sorted(names, key=lambda name: (name in waiting, name))
        for name in kept_first[count:]:
            self.leave(name)
        taken = set(self._all_names())
        numbered = (f"{PREFIX}{number:04d}" for number in range(count + len(taken)))
        free = [name for name in numbered if name not in taken]
        for name in free[: max(0, count - len(names))]:
            self._start(name, plan)

    def leave(self, name: str) -> None:
        """Ask a node to finish its open requests and end. A node for which the cluster has no free
        resources yet is removed at once.
        """
        if _state(self._groups().get(name)) == "CREATED":
            self._leaving.add(name)
            with contextlib.suppress(ValueError):  # it has just gone
                self._ray.get_actor(name).leave.remote()
        else:
            self.remove(name)

    def remind(self) -> None:
        """Repeat the request to leave, because an actor that is being restarted misses it. Remove
        what is left of nodes that have gone.
        """
        for name in set(self._all_names()).symmetric_difference(self._groups()):
            self.remove(name)
        for name in self._leaving.intersection(self._actor_names()):
            with contextlib.suppress(ValueError):  # it has just gone
                self._ray.get_actor(name).leave.remote()

    def remove(self, name: str) -> None:
        """End a node at once."""
        ray = self._ray
        for each in self._actor_names():
            if each.partition(RANK)[0] == name:
                with contextlib.suppress(ValueError):  # it has just gone
                    ray.kill(ray.get_actor(each), no_restart=True)
        if name in self._groups():
            with contextlib.suppress(ValueError):
                group = ray.util.get_placement_group(self._group_prefix + name)
                ray.util.remove_placement_group(group)

    def remove_all(self, timeout_s: float) -> int:
        """Let all nodes leave, and end those that have not left in time. Returns how many had to be
        ended.
        """
        for name in self.names():
            self.leave(name)
        deadline = time.monotonic() + timeout_s
        while self._all_names() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.remind()
        late = self._all_names()
        for name in late:
            self.remove(name)
        return len(late)

    def _actor_names(self) -> list[str]:
        found = self._ray.util.list_named_actors()
        return sorted(each for each in found if each.startswith(PREFIX))

    def _all_names(self) -> list[str]:
        return sorted({each.partition(RANK)[0] for each in self._actor_names()})

    def _groups(self) -> dict[str, dict[str, Any]]:
        """The placement groups of the nodes that have not been removed, by name of the node."""
        found = self._ray.util.placement_group_table().values()
        return {
            each["name"].removeprefix(self._group_prefix): each
            for each in found
            if each["name"].startswith(self._group_prefix) and each["state"] != "REMOVED"
        }

    def _start(self, name: str, plan: NodePlan) -> None:
        ray = self._ray
        self._leaving.discard(name)  # an older node of this name has left
        # Ray places the ranks on as few machines as it can, now or when there is room. Ray's own
        # autoscaler sees groups that wait, and may add machines for them.
        bundles = [plan.bundle] * plan.num_ranks
        group = ray.util.placement_group(
            bundles, "PACK", name=self._group_prefix + name, lifetime="detached"
        )
        arguments = [*plan.arguments, *plan.model_option]
        ranks = [f"{name}{RANK}{rank}" for rank in range(1, plan.num_ranks)]
        kind = self._actor(NodeProcess, name, plan, group, 0)
        node = kind.remote(plan.token, arguments, name, ranks)
        for rank, actor_name in enumerate(ranks, 1):
            kind = self._actor(ShardProcess, actor_name, plan, group, rank)
            kind.remote(plan.token, node, plan.model_option)

    def _actor(self, body: type, name: str, plan: NodePlan, group: Any, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return self._ray.remote(body).options(
            name=name,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=plan.num_cpus,
            num_gpus=plan.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )


def _state(group: dict[str, Any] | None) -> str:
    return "REMOVED" if group is None else str(group["state"])
