"""Builds a node around an engine process."""

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from engine import __version__
from engine.backends.custom.frontend.engine_client import (
    EngineClient,
    OnExit,
    OnMessage,
    ProcessClient,
)
from engine.backends.custom.frontend.engine_link import EngineLink
from engine.backends.custom.ipc.engine_process import WORKER_MODULE, EngineProcess
from engine.backends.custom.options import EngineOptions
from engine.backends.process import RestartPolicy
from engine.core.store.model_digest import model_digest
from engine.routing.nodes.agent import Identity, NodeAgent
from engine.routing.nodes.dial import Endpoint


def make_agent(
    options: EngineOptions,
    endpoints: Sequence[Endpoint],
    process: EngineProcess | None = None,
    name: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    worker: str = WORKER_MODULE,
) -> NodeAgent:
    """A node that is not started yet. `process` is an engine process that was started early and has
    its options. A later one is started with `options`.
    """
    waiting = [process]

    def make_client(on_message: OnMessage, on_exit: OnExit) -> EngineClient:
        ahead = waiting.pop() if waiting else None
        return ProcessClient(worker, options, on_message, on_exit, ahead)

    path = Path(options.model_path)
    digest = model_digest(path)
    identity = Identity(
        node_id=secrets.token_hex(8),
        name=name or socket.gethostname(),
        version=__version__,
        model=digest,
        model_name=path.stem if path.is_file() else path.name,
        fingerprint=lambda ready: options.fingerprint(
            digest, ready.device, ready.dtype, ready.max_seq_len
        ),
    )
    # The servers move the requests of an engine that died, so nothing waits for its restart here.
    link = EngineLink(make_client, RestartPolicy(), max_revivals=0)
    return NodeAgent(link, identity, endpoints, say)
