"""A server that nodes may join, and nodes with the toy engine, in one event loop. The engines of
the nodes are real processes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.backends.base import BackendHolder
from engine.core.interfaces.backend import CompletionRequest, GenerationContext, UsageEvent
from engine.core.interfaces.request import SamplingParams
from engine.ipc.options import EngineOptions
from engine.routing.nodes import make
from engine.routing.nodes.agent import NodeAgent
from engine.routing.nodes.dial import endpoint_of
from engine.routing.nodes.manager import NodeManager
from engine.routing.nodes.pool import NodePool
from engine.servers.http.protocol import http_server
from tests.support.toy_engine.backend import TEXT, WORKER, ToyBackend

TOKEN = "a-token-that-nodes-share"


class NoEngine(ToyBackend):
    """A server without an engine of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._link = NodePool(None, "", max_revivals=8)

    async def start(self) -> str:
        self._files, self._text = "", TEXT
        return "nodes://"


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Routed:
    """A server: only its socket for nodes, and its backend."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.manager = NodeManager(BackendHolder(backend), TOKEN, max_revivals=8)
        self.server = http_server(_nothing, 1, upgrades=self.manager.upgrades)
        self.url = ""

    @property
    def pool(self) -> NodePool:
        assert isinstance(self.backend._link, NodePool)
        return self.backend._link

    @property
    def names(self) -> list[str]:
        return [each["name"] for each in self.manager.discover() if each["state"] == "ready"]

    async def joined(self, *names: str) -> None:
        await until(lambda: sorted(names) == sorted(self.names))

    async def ask(self, prompt: tuple[int, ...], **fields: Any) -> tuple[str, UsageEvent]:
        """The text of an answer and its usage."""
        salt, request_id = fields.pop("salt", ""), fields.pop("request_id", None)
        Routed.num_asked += 1
        context = GenerationContext(
            request_id=request_id or f"r{Routed.num_asked}",
            model="toy",
            salt=salt,
            params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | fields),
        )
        text, usage = "", None
        async for event in self.backend.complete(CompletionRequest(context=context, prompt=prompt)):
            text += getattr(event, "text", "")
            usage = event if isinstance(event, UsageEvent) else usage
        assert usage is not None
        return text, usage

    num_asked = 0


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def routed(backend: Any | None = None) -> AsyncIterator[Routed]:
    made = Routed(backend or ToyBackend(block_size=4))
    made.server.config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: made.server.config.http_protocol_class(
            config=made.server.config, server_state=made.server.server_state, app_state={}
        ),
        "127.0.0.1",
        0,
    )
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await made.backend.start()
    await made.manager.start()
    try:
        yield made
    finally:
        await made.manager.stop()
        await made.backend.stop()
        server.close()


@asynccontextmanager
async def node(
    *servers: Routed, name: str = "node", token: str = TOKEN, wait: bool = True, **options: Any
) -> AsyncIterator[NodeAgent]:
    """A node that has joined, with an engine process."""
    chosen = EngineOptions(**{"model_path": "toy", "framework": "toy", "block_size": 4} | options)
    endpoints = [endpoint_of(each.url, token) for each in servers]
    agent = make.make_agent(chosen, endpoints, name=name, worker=WORKER)
    running = asyncio.create_task(agent.run(drain_timeout_s=10.0))
    try:
        if wait:
            for each in servers:
                await until(lambda each=each: name in each.names or running.done())
            if running.done():
                running.result()
        yield agent
    finally:
        agent.leave()
        await asyncio.gather(running, return_exceptions=True)
