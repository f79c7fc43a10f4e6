"""The messages between a router and its nodes.

A node opens the connection by an HTTP request, which the server answers with 101 (`dial.py`). Both
prove that they have the node token, and do not send it. From then on both sides send sealed frames
(`ipc/transport.py`), so nobody in between can change, repeat or add one. Requests and tokens are
the same messages that a frontend exchanges with its own engine process. Both sides send beats, so
that each notices when the other is gone.
"""

from typing import Annotated

import msgspec

from engine.core.build_name import build_name
from engine.core.interfaces.handover import BlockSource, Role
from engine.core.interfaces.request import (
    Abort,
    CachedPrefixes,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    Ready,
)
from engine.core.interfaces.stats import EngineStats

UPGRADE = "engine-node"
BUILD_HEADER = "engine-build"
NONCE_HEADER = "engine-nonce"
PROOF_HEADER = "engine-proof"
CONNECT_PATH = "/v1/nodes/connect"
BEAT_S = 0.2
LOST_AFTER_S = 3.0  # a side that was silent for this long is gone
HELLO_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 256 * 2**20
# Pieces of results are not queued behind more than this: their request fails, not the connection.
MAX_UNSENT_RESULT_BYTES = MAX_UNSENT_BYTES // 2


# Names are shown to people: they have no control characters.
Name = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a node, when its engine is loaded."""

    node_id: Name  # random; the same for all connections of one `engine node join`
    name: Name
    model: Name  # the digest of the model's files
    model_name: Name  # for people
    fingerprint: Name  # equal for engines in which a request has the same result
    ready: Ready
    role: Role = "both"
    # Where a prefill node serves its blocks. An empty host is the address that it joins from.
    blocks: BlockSource | None = None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The server accepts the node. `now` is the server's clock, for the times in timelines."""

    name: str
    now: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The server does not accept the node. If `is_final`, it would not do so later either."""

    message: str
    is_final: bool = True


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""

    stats: EngineStats | None = None


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node takes no new requests, and leaves when its last one has ended."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The server asks the node to leave."""


def node_build() -> str:
    """The build, as far as it concerns the messages between servers and nodes."""
    names = ("handover", "interp", "request", "snapshot", "stats", "timeline")
    return build_name(
        "routing/nodes/wire.py",
        "routing/nodes/dial.py",
        "routing/nodes/proofs.py",
        "core/shards/link.py",
        "ipc/transport.py",
        "core/prefix_hashes.py",
        *(f"core/interfaces/{name}.py" for name in names),
    )


FromNode = Hello | Beat | Leaving | Deltas | CachedPrefixes | ControlReply
ToNode = Welcome | Refused | Beat | Drain | GenerateRequest | Abort | Control
