"""Runs a recorded request again, and collects its tokens."""

import asyncio
import secrets

from msgspec.structs import replace

from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.request import GenerateRequest, TokenDelta
from engine.frontend.link import Link
from engine.frontend.request_recovery import Engine


class _Collected:
    """Receives the tokens of all choices of a request."""

    def __init__(self, link: Link, num_choices: int) -> None:
        self.engine: Engine = link
        self.token_ids: dict[int, list[int]] = {choice: [] for choice in range(num_choices)}
        self._num_open = num_choices
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(self, *items: TokenDelta | EngineError) -> None:
        for item in items:
            if self.ended.done():
                return
            if isinstance(item, EngineError):
                self.ended.set_exception(item)
            elif item.finish_reason in ("abort", "error"):
                code = item.error_code or InferenceError.code
                message = item.error_message or "The request was aborted."
                self.ended.set_exception(error_from_code(code, message, item.retry_after))
            else:
                self.token_ids[item.choice].extend(item.token_ids)
                self._num_open -= item.finish_reason is not None
                if not self._num_open:
                    self.ended.set_result(None)


async def replayed_tokens(link: Link, request: GenerateRequest) -> dict[int, list[int]]:
    """Submit the request under a new id and return the tokens of each choice."""
    request_id = f"replay-{secrets.token_hex(8)}"
    collected = _Collected(link, request.params.n)
    interp = None if request.interp is None else request.interp.only_edits()
    silent = {"reports_progress": False, "tells_begin": False}
    copy = replace(request, request_id=request_id, interp=interp, **silent)
    link.submit(copy, collected)
    try:
        await collected.ended
    except BaseException:
        collected.engine.forget(request_id, None)
        raise
    finally:
        collected.engine.done(request_id)
    return collected.token_ids
