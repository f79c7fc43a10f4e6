"""Computes embeddings. Each prompt becomes a separate request to the engine, which batches the
request with all other requests.

A call of `vectors_of` has at most `MAX_IN_FLIGHT` open requests at a time, and never more than the
engine's queue accepts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.backends.base import check_input
from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.backend import Embeddings, EmbedRequest, TextPair
from engine.core.interfaces.request import AdapterRef, GenerateRequest, SamplingParams, TokenDelta
from engine.frontend.link import Link
from engine.frontend.prompts import check_prompt
from engine.frontend.request_recovery import Engine
from engine.frontend.text_model import TextModel

MAX_IN_FLIGHT = 128
Encode = Callable[..., Awaitable[tuple[tuple[int, ...], int]]]


class _Awaited:
    """Receives the embedding of one prompt from the engine."""

    def __init__(self, link: Link) -> None:
        self.engine: Engine = link
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
            self.vector.set_exception(error_from_code(code, message, item.retry_after))


async def embedded(
    request: EmbedRequest,
    text: TextModel,
    max_seq_len: int,
    max_queued: int,
    link: Link,
    encode: Encode,
    adapter: AdapterRef | None = None,
) -> Embeddings:
    """The embeddings of all inputs. `encode` runs a function of the tokenizer in a thread."""
    encoded = await _encoded(request, text, max_seq_len, encode)
    requests = _requests_of(request, encoded, adapter)
    size = 1 if text.reranks else text.config.hidden_size
    vectors = await vectors_of(link, requests, max_queued, size, text.reranks)
    if text.ranker is not None:
        vectors = _scores_along(vectors, text.ranker.direction)
    return Embeddings(vectors, sum(len(prompt) for prompt, _ in encoded))


async def _encoded(
    request: EmbedRequest, text: TextModel, max_seq_len: int, encode: Encode
) -> list[tuple[tuple[int, ...], int]]:
    """The tokens of each input, and where the second text of a pair begins."""
    limit = request.truncate_prompt_tokens
    most = max_seq_len if limit is not None and limit < 0 else limit
    names = request.prompt_names or (None,) * len(request.inputs)
    encoded = [
        await encode(text.encode_pair, each.first, each.second, most)
        if isinstance(each, TextPair)
        else await encode(text.encode_input, each, name, most)
        for each, name in zip(request.inputs, names, strict=True)
    ]
    for index, (prompt, _) in enumerate(encoded):
        field = "input" if len(encoded) == 1 else f"input[{index}]"
        check_input(len(prompt), max_seq_len, field)
        check_prompt(prompt, text.config.vocab_size, field)
    return encoded


def _requests_of(
    request: EmbedRequest,
    encoded: Sequence[tuple[tuple[int, ...], int]],
    adapter: AdapterRef | None,
) -> list[GenerateRequest]:
    """The requests to the engine. `encoded` has the tokens of each input, and where the second text
    of a pair begins.
    """
    return [
        GenerateRequest(
            request_id=f"{request.request_id}-{index}",
            prompt=prompt,
            params=SamplingParams(max_tokens=1),
            priority=request.priority,
            salt=request.salt,
            tenant=request.tenant,
            timeout_s=request.timeout_s,
            # A call opens only some of its requests at a time, so later requests may wait longer.
            # The limit on the waiting time therefore holds only for the first.
            queue_timeout_s=request.queue_timeout_s if index == 0 else None,
            pools=True,
            second_start=second_start,
            adapter=adapter,
        )
        for index, (prompt, second_start) in enumerate(encoded)
    ]


async def vectors_of(
    link: Link,
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
            awaited = _Awaited(link)
            link.submit(request, awaited)
            try:
                return np.frombuffer(await awaited.vector, np.float32)
            except BaseException:
                awaited.engine.forget(request.request_id, None)
                raise
            finally:
                awaited.engine.done(request.request_id)

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


def _scores_along(states: NDArray[np.float32], direction: Sequence[float]) -> NDArray[np.float32]:
    """The scores (S, 1) of a decoder's hidden states (S, D): sigmoid(state * direction)."""
    logits = states.astype(np.float64) @ np.array(direction)
    with np.errstate(over="ignore"):
        scores: NDArray[np.float32] = (1 / (1 + np.exp(-logits)))[:, None].astype(np.float32)
    return scores
