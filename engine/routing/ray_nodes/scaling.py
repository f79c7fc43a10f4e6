"""Changes the number of nodes with the number of open requests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.errors import UnavailableError
from engine.routing.ray_nodes.launcher import NodePlan, RayNodes

log = logging.getLogger(__name__)

POLL_S = 1.0


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


class Scaling:
    """Asks the server for its open requests, and changes the number of nodes. What goes wrong is
    logged once, until it changes.
    """

    def __init__(
        self, nodes: RayNodes, plan: NodePlan, scaler: Autoscaler, count_open: Callable[[], int]
    ) -> None:
        self._nodes = nodes
        self._plan = plan
        self._scaler = scaler
        self._count_open = count_open
        self._trouble = ""

    def run(self, stop: Callable[[float], bool]) -> None:
        """Run until `stop`, which waits for some seconds, returns true."""
        while not stop(POLL_S):
            self.step(time.monotonic())

    def step(self, now: float) -> None:
        try:
            num_open = self._count_open()
        except UnavailableError as error:
            self._tell(error.message)  # the nodes stay as they are until the server is back
            return
        self._nodes.remind()
        here = len(self._nodes.names())
        wanted = self._scaler.wanted(here, num_open, now)
        if wanted != here:
            log.info("%d open requests: %d nodes instead of %d", num_open, wanted, here)
            self._nodes.scale_to(wanted, self._plan)
        self._tell(self._look())

    def _look(self) -> str:
        """What is wrong with the nodes, or an empty text."""
        said = [f"{name} failed: {text}" for name, text in self._nodes.failures().items()]
        waiting = self._nodes.waiting()
        if waiting:
            ranks = self._plan.num_ranks
            needs = ", ".join(f"{count:g} {what}" for what, count in self._plan.bundle.items())
            each = f"{ranks} x ({needs})" if ranks > 1 else needs
            said.append(f"no room in the Ray cluster for {', '.join(waiting)} ({each} each)")
        return "; ".join(said)

    def _tell(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble
