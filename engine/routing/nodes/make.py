"""Builds a node around an engine process."""

import hashlib
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.core.errors import ConfigError
from engine.core.store.model_digest import model_digest
from engine.frontend.engine_link import EngineLink
from engine.ipc.child_process import RestartPolicy
from engine.ipc.connection import (
    EngineClient,
    OnExit,
    OnMessage,
    ProcessClient,
)
from engine.ipc.engine_process import WORKER_MODULE, EngineProcess
from engine.ipc.options import EngineOptions, PeerOptions
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

    peers = options.peers or PeerOptions(role="both")
    if peers.role == "prefill" and not peers.cert_file and any(each.tls for each in endpoints):
        raise ConfigError(
            "a prefill node that joins by https sends its blocks by TLS too: set"
            " server.tls_cert_file and server.tls_key_file on this machine; any certificate will do"
        )
    path = Path(options.model_path)
    digest = model_digest(path)
    identity = Identity(
        node_id=secrets.token_hex(8),
        name=name or socket.gethostname(),
        model=digest,
        model_name=path.stem if path.is_file() else path.name,
        fingerprint=lambda ready: options.fingerprint(
            digest, ready.device, ready.dtype, ready.max_seq_len
        ),
        role=peers.role,
        block_host=peers.host,
        block_token=secrets.token_hex(32),
        certificate=certificate_digest(Path(peers.cert_file)) if peers.cert_file else "",
    )
    # The servers move the requests of an engine that died, so nothing waits for its restart here.
    link = EngineLink(make_client, RestartPolicy(), max_revivals=0)
    return NodeAgent(link, identity, endpoints, say)


def certificate_digest(path: Path) -> str:
    """The SHA-256 of the first certificate of a PEM file, in hex."""
    try:
        pem = path.read_text(encoding="ascii")
        end = pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(pem[pem.index(ssl.PEM_HEADER) : end])
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.tls_cert_file: {path} is no certificate: {error}") from None
    return hashlib.sha256(der).hexdigest()
