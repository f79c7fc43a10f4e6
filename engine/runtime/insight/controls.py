"""Answers the messages that concern an engine's log and its cache, and none of its requests."""

from typing import TYPE_CHECKING

from engine.core.interfaces.request import Control, ControlReply
from engine.core.observability.logging import set_level

if TYPE_CHECKING:
    from engine.runtime.kv_cache import KVCache

NO_BLOCKS = "This engine serves no blocks: its role is not prefill."


def answer_control(kv: "KVCache", message: Control) -> ControlReply:
    if message.action == "log_level":
        return ControlReply(message.control_id, True, set_level(message.value))
    if message.action == "report_cache":
        # Imported late: few engines have a router that asks.
        from engine.runtime.insight.cache_report import report_cache

        report_cache(kv)
        return ControlReply(message.control_id, True)
    if message.action == "serve_blocks":
        return _serve_blocks(kv, message)
    freed = kv.flush()
    return ControlReply(message.control_id, True, f"{freed} blocks freed")


def _serve_blocks(kv: "KVCache", message: Control) -> ControlReply:
    from engine.runtime.tiers.kv_tiers import KVTiers  # few engines have tiers

    tiers = kv.find(KVTiers)
    server = None if tiers is None else tiers.block_server
    if server is None:
        return ControlReply(message.control_id, False, NO_BLOCKS)
    token, _, host = message.value.partition(" ")
    try:
        return ControlReply(message.control_id, True, str(server.serve(token, host)))
    except OSError as error:
        reason = (
            f"blocks can't be served at {host}: {error.strerror or error}; set nodes.block_listen"
            " to an address of this machine"
        )
        return ControlReply(message.control_id, False, reason)
