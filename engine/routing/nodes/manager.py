"""Registers the nodes of a server, watches their health, and lists them.

A node is accepted if it has the token, the same build of the engine, and the same model files.
Its engine then joins the pool of that model's backend. A node that is silent gets no more requests.
If it stays silent, or if its connection breaks, it is lost, and its requests move.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.backends.base import BackendHolder, InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.core.build_name import ADVICE
from engine.core.errors import EngineError, NotFoundError, UnavailableError
from engine.core.shards.link import proof_of, seals_of
from engine.core.store.model_digest import model_digest
from engine.frontend.engine_link import EngineLink
from engine.frontend.link import Link
from engine.ipc.options import EngineOptions
from engine.routing.nodes.node import Node, NodeRefusedError
from engine.routing.nodes.pool import NodePool
from engine.routing.nodes.prefill import Prefills
from engine.routing.nodes.proofs import is_proved, new_challenge
from engine.routing.nodes.wire import (
    BEAT_S,
    BUILD_HEADER,
    CONNECT_PATH,
    HELLO_TIMEOUT_S,
    LOST_AFTER_S,
    NONCE_HEADER,
    PROOF_HEADER,
    UPGRADE,
    Beat,
    Drain,
    Hello,
    Refused,
    Welcome,
    node_build,
)
from engine.routing.on_demand import OnDemand
from engine.routing.router import Router

log = logging.getLogger(__name__)
Upgrade = Callable[[Sequence[tuple[bytes, bytes]], asyncio.Transport], None]

EJECTED_AFTER_S = 0.7  # a node that was silent for this long gets no new requests
ROUTER_BEAT_S = 1.0
MAX_NODES = 1024  # connections of nodes, also those that have not said hello yet
MAX_SHOWN = 100  # characters of a node's build in messages
# If this process itself was held up for this long, it can't tell which nodes were silent.
HELD_UP_S = 0.5


class NodeManager:
    """The nodes of a server. `token` is what nodes must present. `max_revivals` is how often a
    request continues after the loss of its engine. `min_prefill_tokens` is for `Prefills`.
    """

    def __init__(
        self,
        holder: BackendHolder,
        token: str,
        max_revivals: int,
        min_prefill_tokens: int | None = None,
    ) -> None:
        self._holder = holder
        self._token = token.encode()
        self._max_revivals = max_revivals
        self._min_prefill_tokens = min_prefill_tokens
        self._digests: dict[str, str] = {}  # model path -> digest of its files
        self._pools: dict[CustomBackend, NodePool] = {}
        self._nodes: dict[str, Node] = {}  # by node id
        self._connected: set[Node] = set()  # including those that have not been accepted
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        self.close()
        if self._watching is not None:
            self._watching.cancel()

    def close(self) -> None:
        """Close all connections, because the server ends. The nodes try to connect again."""
        for node in list(self._connected):
            node.connection.transport.close()

    # --- a node connects ---

    def takes(self, headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        """Check the proof and the build of a node that connects. Returns the refusal as an HTTP
        status and a message, or None if the node may connect.
        """
        given = {name: value.decode("ascii", "replace") for name, value in headers}
        if not is_proved(self._token, "join", given.get(b"authorization", "")):
            return "401 Unauthorized", "The node token is wrong."
        if len(self._connected) >= MAX_NODES:
            return "503 Service Unavailable", f"The server has {MAX_NODES} nodes already."
        build = given.get(BUILD_HEADER.encode(), "of an unknown build")[:MAX_SHOWN]
        if build != node_build():
            message = f"The node runs engine {build}, and the server {node_build()}; {ADVICE}."
            return "409 Conflict", message
        return None

    @property
    def upgrades(self) -> dict[tuple[bytes, bytes], Upgrade]:
        """The protocol to which a connection may switch, by path and name."""
        return {(CONNECT_PATH.encode(), UPGRADE.encode()): self.upgrade}

    def upgrade(self, headers: Sequence[tuple[bytes, bytes]], transport: asyncio.Transport) -> None:
        """Take over an HTTP connection that a node has opened."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else "this machine"
        refusal = self.takes(headers)
        if refusal is not None:
            if dict(headers).get(b"authorization"):  # without one, it only asks for the challenge
                log.warning("a node from %s was refused: %s", address, refusal[1])
            transport.write(_refused(*refusal, new_challenge()))
            transport.close()
            return
        node = Node(self, address)
        self._connected.add(node)
        theirs, ours = dict(headers)[b"authorization"].decode().split()[2], secrets.token_hex(16)
        node.connection.trust(*seals_of(self._token, ours, theirs, is_lead=True))
        transport.set_protocol(node.connection)
        node.connection.connection_made(transport)
        transport.write(
            f"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: {UPGRADE}\r\n"
            f"{NONCE_HEADER}: {ours}\r\n"
            f"{PROOF_HEADER}: {proof_of(self._token, 'lead', theirs, ours)}\r\n\r\n".encode()
        )

    def greet(self, node: Node, hello: Hello) -> None:
        if node.hello is not None:
            raise NodeRefusedError("a node says hello only once")
        node.hello = hello
        task = asyncio.create_task(self._greet(node, hello))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, node: Node, hello: Hello) -> None:
        try:
            await self.register(node, hello)
        except EngineError as error:
            log.warning("node %s (%s) was refused: %s", hello.name, node.address, error.message)
            node.connection.send(Refused(error.message, isinstance(error, NodeRefusedError)))
            node.connection.transport.close()

    async def register(self, node: Node, hello: Hello) -> None:
        """Add the engine of a node to the pool of its model. Raises `NodeRefusedError` if it does
        not fit, and another error if it may fit later.
        """
        backend = await self._backend_for(hello)
        if not node.connection.is_open:  # it left while the digest was computed
            return
        pool = self._pool_of(backend, hello.model)
        self._check_context(backend, pool, hello)
        old = self._nodes.pop(hello.node_id, None)
        if old is not None:
            old.connection.transport.abort()  # the node has noticed the loss before we did
            if old.client is not None:
                old.client.lost()
        name = self._free_name(pool, hello.name)
        engine = pool.add(name, node.make_client)
        engine.fingerprint, engine.role = hello.fingerprint, hello.role
        if hello.blocks is not None:
            host = hello.blocks.host or node.address
            engine.blocks = msgspec.structs.replace(hello.blocks, host=host)
        node.engine, node.pool, node.joined_at = engine, pool, time.monotonic()
        node.vocab_size = backend.vocab_size
        self._nodes[hello.node_id] = node
        await engine.link.start()
        if not node.connection.is_open:
            return
        node.connection.send(Welcome(name, time.monotonic()))
        pool.begin(engine)
        log.info("node %s joined from %s", name, node.address)

    async def _backend_for(self, hello: Hello) -> CustomBackend:
        known = []
        for backend in self._backends():
            path = backend.model_path
            if backend.resolve(None) is None:
                raise UnavailableError("The server is still loading its model.")
            if path not in self._digests:
                self._digests[path] = await asyncio.to_thread(model_digest, Path(path))
            if self._digests[path] == hello.model:
                return backend
            known.append(f"{Path(path).name} ({self._digests[path][:8]})")
        served = ", ".join(known) or "no model of an engine of our own"
        raise NodeRefusedError(
            f"The node has the model {hello.model_name} ({hello.model[:8]}), and the server"
            f" serves {served}; join with --model and the same files."
        )

    def _backends(self) -> Iterator[CustomBackend]:
        """The backends of our own engines that are loaded."""
        current = self._holder.current.unwrapped
        found: list[InferenceBackend | None] = [current]
        if isinstance(current, Router):
            found = [each.backend for each in current.replicas]
        for each in found:
            inner = each.loaded if isinstance(each, OnDemand) else each
            if isinstance(inner, CustomBackend):
                yield inner

    def _pool_of(self, backend: CustomBackend, digest: str) -> NodePool:
        known = self._pools.get(backend)
        if known is not None:
            return known

        def make(link: Link, options: EngineOptions) -> Link:
            if isinstance(link, NodePool):  # this server has no engine of its own
                link.prefills.costs.min_tokens = self._min_prefill_tokens
                return link
            assert isinstance(link, EngineLink)
            ready = link.last_ready
            facts = ("", "", 0) if ready is None else (ready.device, ready.dtype, ready.max_seq_len)
            fingerprint = options.fingerprint(digest, *facts)
            pool = NodePool(link, fingerprint, self._max_revivals, self._min_prefill_tokens)
            if pool.own is not None and options.peers is not None:
                pool.own.role = options.peers.role
            return pool

        pool = backend.pool(make)
        assert isinstance(pool, NodePool)
        if pool.own is not None:
            pool.begin(pool.own)
        self._pools = {each: one for each, one in self._pools.items() if each in self._backends()}
        self._pools[backend] = pool
        return pool

    def _check_context(self, backend: CustomBackend, pool: NodePool, hello: Hello) -> None:
        if hello.ready.max_seq_len > backend.max_position:  # later nodes would be compared with it
            raise NodeRefusedError(
                f"The node's context is {hello.ready.max_seq_len} tokens, and the longest context"
                f" of the model {backend.max_position}."
            )
        known = pool.last_ready
        if known is not None and hello.ready.max_seq_len < known.max_seq_len:
            raise NodeRefusedError(
                f"The node's context is {hello.ready.max_seq_len} tokens, and the server's"
                f" {known.max_seq_len}; give both the same --max-sequence-length, or the node more"
                " memory."
            )

    def _free_name(self, pool: NodePool, wanted: str) -> str:
        names = (wanted, *(f"{wanted}-{number}" for number in range(2, len(pool.engines) + 3)))
        return next(each for each in names if each not in pool.engines)

    # --- nodes that are here ---

    def dropped(self, node: Node) -> None:
        self._connected.discard(node)
        if node.hello is not None and self._nodes.get(node.hello.node_id) is node:
            del self._nodes[node.hello.node_id]
            assert node.engine is not None
            level = logging.INFO if node.engine.is_leaving else logging.WARNING
            log.log(level, "node %s is gone", node.engine.name)

    def discover(self) -> list[dict[str, Any]]:
        """All nodes that are here."""
        return [node.describe() for node in self._nodes.values() if node.engine is not None]

    def num_open(self) -> int:
        """Open requests of all models that nodes may serve, including those that wait for one."""
        return sum(backend.num_open for backend in self._backends())

    @property
    def prefills(self) -> list[Prefills]:
        """What prefill nodes did, for each model."""
        return [pool.prefills for pool in self._pools.values()]

    def decisions(self) -> list[dict[str, str]]:
        """The last requests that were placed, and why they were placed there."""
        return [
            {"request_id": request_id, "node": name, "why": why}
            for pool in self._pools.values()
            for request_id, name, why in pool.decisions
        ]

    def drain(self, name: str) -> None:
        """Ask a node to leave when its open requests have ended."""
        for node in self._nodes.values():
            if node.engine is not None and node.engine.name == name:
                node.connection.send(Drain())
                return
        raise NotFoundError(f"There is no node {name} here.", param="name")

    def health(self, now: float) -> None:
        """Eject nodes that are silent, take back those that speak again, and drop lost ones."""
        for node in list(self._connected):
            silent_s = now - node.connection.heard_at
            if node.engine is None or node.pool is None:
                if silent_s > HELLO_TIMEOUT_S:
                    node.connection.transport.abort()
                continue
            if silent_s > LOST_AFTER_S:
                log.warning("node %s was silent for %.1f s", node.engine.name, silent_s)
                node.connection.transport.abort()
            is_silent = silent_s > EJECTED_AFTER_S
            if is_silent is not node.engine.is_silent:
                node.engine.is_silent = is_silent
                node.pool.refresh(node.engine)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = beat_at = loop.time()
        while True:
            await asyncio.sleep(BEAT_S)
            now = loop.time()
            if now - looked_at < BEAT_S + HELD_UP_S:
                self.health(now)
            looked_at = now
            if now - beat_at >= ROUTER_BEAT_S:
                beat_at = now
                for node in self._nodes.values():
                    node.connection.send(Beat())


def _refused(status: str, message: str, challenge: str) -> bytes:
    """An HTTP response that refuses a node. If its proof is missing or wrong, it has the random
    number for another one.
    """
    body = msgspec.json.encode({"error": {"message": message, "code": int(status[:3])}})
    asked = f"{NONCE_HEADER}: {challenge}\r\n" if status.startswith("401") else ""
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{asked}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
