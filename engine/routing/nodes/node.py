"""A node, as the server that it joined sees it: its connection, and its engine in a pool."""

import logging
import time
from collections import Counter
from typing import Any, Protocol

from engine.core.errors import ConflictError, UnavailableError
from engine.core.interfaces.request import (
    CachedPrefixes,
    ControlReply,
    Deltas,
    Stats,
    ToEngine,
)
from engine.core.sandbox.liveness import Vitals
from engine.ipc.connection import Connection, OnExit, OnMessage
from engine.routing.nodes.pool import NodePool
from engine.routing.nodes.pooled import PooledEngine
from engine.routing.nodes.wire import MAX_UNSENT_BYTES, Beat, FromNode, Hello, Leaving

log = logging.getLogger(__name__)

MAX_PREFIXES = 2**20  # that a node may report: 64 million tokens


class NodeRefusedError(ConflictError):
    """A node can't join. The message says why."""


class Registry(Protocol):
    """Who decides about nodes: `NodeManager`."""

    def greet(self, node: "Node", hello: Hello) -> None: ...

    def dropped(self, node: "Node") -> None: ...


class NodeClient:
    """Sends messages to the engine of a node, as `ProcessClient` does to a process here."""

    pid = 0

    def __init__(self, node: "Node", on_message: OnMessage, on_exit: OnExit) -> None:
        self._node = node
        self.on_message = on_message
        self._on_exit = on_exit

    async def start(self) -> None:
        assert self._node.hello is not None
        self.on_message(self._node.hello.ready)

    def send(self, message: ToEngine) -> None:
        if not self._node.connection.send(message):
            raise UnavailableError("The node is gone.", retry_after=1.0)

    def vitals(self) -> Vitals | None:
        return None  # the node watches its own engine

    def wake(self) -> None:
        pass

    async def kill(self) -> bool:
        self._node.connection.transport.abort()
        return True

    async def stop(self) -> None:
        self._node.connection.transport.close()

    def lost(self) -> None:
        self._on_exit(0)


class Node:
    """A connection from a node. It has an engine in a pool once it was accepted."""

    def __init__(self, manager: "Registry", address: str) -> None:
        self._manager = manager
        self.address = address
        self.hello: Hello | None = None
        self.joined_at = 0.0
        self.vocab_size = 0  # of the model that it serves
        self.pool: NodePool | None = None
        self.engine: PooledEngine | None = None
        self.client: NodeClient | None = None
        self.connection: Connection[FromNode] = Connection(
            FromNode, self._heard, self._lost, max_unsent_bytes=MAX_UNSENT_BYTES, is_sealed=True
        )

    def make_client(self, on_message: OnMessage, on_exit: OnExit) -> NodeClient:
        self.client = NodeClient(self, on_message, on_exit)
        return self.client

    def _heard(self, message: FromNode) -> None:
        if isinstance(message, Hello):
            self._manager.greet(self, message)
        elif self.client is None or self.engine is None or self.pool is None:
            raise NodeRefusedError("the first message of a node must be its hello")
        elif isinstance(message, Beat):
            if message.stats is not None:
                if not message.stats.is_sound:
                    raise NodeRefusedError("these can't be the statistics of an engine")
                self.client.on_message(Stats(message.stats))
        elif isinstance(message, Leaving):
            log.info("node %s is leaving", self.engine.name)
            self.pool.drain(self.engine)
        else:
            assert isinstance(message, Deltas | CachedPrefixes | ControlReply)
            if isinstance(message, Deltas):
                self._check_tokens(message)
            elif isinstance(message, CachedPrefixes):
                self._count(self.pool.router.table.count(self.engine.number), message)
            self.client.on_message(message)

    def _count(self, num_known: int, news: CachedPrefixes) -> None:
        if len(news.added) + (0 if news.is_all else num_known) > MAX_PREFIXES:
            raise NodeRefusedError(f"a node has at most {MAX_PREFIXES} cached prefixes")

    def _check_tokens(self, message: Deltas) -> None:
        """A token that the model lacks, or for which nobody asked, must reach neither a client nor
        the next engine of its request.
        """
        assert self.engine is not None
        counts: Counter[tuple[str, int]] = Counter()
        for delta in message.deltas:
            ids = delta.token_ids
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise NodeRefusedError("a node sent a token that the model lacks")
            counts[delta.request_id, delta.choice] += len(ids)
        for (request_id, choice), count in counts.items():
            left = self.engine.link.num_left(request_id, choice)
            if left is not None and count > left:
                raise NodeRefusedError("a node sent more tokens than it was asked for")

    def _lost(self) -> None:
        self._manager.dropped(self)
        if self.client is not None:
            self.client.lost()

    def describe(self) -> dict[str, Any]:
        assert self.hello is not None and self.engine is not None and self.pool is not None
        stats = self.engine.link.stats
        return {
            "name": self.engine.name,
            "address": self.address,
            "state": self.engine.state,
            "role": self.engine.role,
            "model": self.hello.model_name,
            "device": self.hello.ready.device,
            "in_flight": self.engine.load,
            "requests": self.engine.num_requests,
            "free_blocks": None if stats is None else stats.num_free_blocks,
            "blocks": self.hello.ready.num_blocks,
            "cached_prefixes": self.pool.router.table.count(self.engine.number),
            "joined_s": round(time.monotonic() - self.joined_at, 1),
        }
