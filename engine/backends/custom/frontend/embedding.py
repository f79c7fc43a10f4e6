"""Computes embeddings. Each prompt becomes a separate request to the engine, which batches the
request with all other requests.

A call of `vectors_of` has at most `MAX_IN_FLIGHT` open requests at a time, and never more than the
engine's queue accepts.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.frontend.engine_link import EngineLink
from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.request import GenerateRequest, TokenDelta

MAX_IN_FLIGHT = 128


class _Awaited:
    """Receives the embedding of one prompt from the engine."""

    def __init__(self) -> None:
        self.vector: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, *items: TokenDelta | EngineError) -> None:
        item = items[0]  # a text has one delta, or an error
        if self.vector.done():
            return
        if isinstance(item, EngineError):
            self.vector.set_exception(item)
        elif item.vector is not None:
            self.vector.set_result(item.vector)
        else:
            code = item.error_code or InferenceError.code
            message = item.error_message or "The request was aborted."
            self.vector.set_exception(error_from_code(code, message))


async def vectors_of(
    link: EngineLink,
    requests: Sequence[GenerateRequest],
    max_queued: int,
    num_dimensions: int,
    are_scores: bool = False,
) -> NDArray[np.float32]:
    """The embeddings (requests, dimensions), in the order of the requests. Each has unit length,
    unless `are_scores`. If a request fails, the other requests are cancelled, and the error of the
    failed one is raised.
    """
    if not requests:
        return np.zeros((0, num_dimensions), np.float32)
    gate = asyncio.Semaphore(min(MAX_IN_FLIGHT, max_queued))

    async def one(request: GenerateRequest) -> NDArray[np.float32]:
        async with gate:
            awaited = _Awaited()
            link.submit(request, awaited)
            try:
                return np.frombuffer(await awaited.vector, np.float32)
            except BaseException:
                link.forget(request.request_id, None)
                raise
            finally:
                link.done(request.request_id)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        rows = np.stack(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if are_scores:
        return rows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float32] = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def scores_along(states: NDArray[np.float32], direction: Sequence[float]) -> NDArray[np.float32]:
    """The scores (S, 1) of a decoder's hidden states (S, D): sigmoid(state * direction)."""
    logits = states.astype(np.float64) @ np.array(direction)
    with np.errstate(over="ignore"):
        scores: NDArray[np.float32] = (1 / (1 + np.exp(-logits)))[:, None].astype(np.float32)
    return scores
