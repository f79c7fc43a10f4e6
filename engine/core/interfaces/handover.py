"""A prompt that one engine computes and another engine continues, and where its blocks are."""

from typing import Literal

import msgspec

# What this engine is for. A prefill engine computes prompts for decode engines.
Role = Literal["both", "prefill", "decode"]
PrefillOutcome = Literal[
    "done",
    "refused",  # the node answered with an error
    "lost",  # the node died, or its connection broke
    "late",  # the node took much longer than expected
]
PEERS = "peers"  # the name of the tier that fetches blocks from other engines


class BlockSource(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine serves blocks of its KV cache to other engines."""

    host: str
    port: int
    token: str
    certificate: str = ""  # SHA-256 of its TLS certificate, in hex; empty: there is no TLS


class Prefilled(msgspec.Struct, frozen=True, array_like=True):
    """What a prefill node did for a prompt."""

    node: str
    outcome: PrefillOutcome
    seconds: float  # from sending the prompt to the node's answer
    num_cached: int = 0  # prompt tokens that the node had cached


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """Comes with a request whose prompt a prefill node was asked to compute. If it did not, there
    is no `source`, and the prompt is computed where the request goes on.
    """

    prefilled: Prefilled
    source: BlockSource | None = None
