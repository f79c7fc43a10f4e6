"""What a request gets back at its end: captured values, lens, attention patterns, attribution.

Lens and attribution need the LM head. A few rows of it are computed after each step, so that other
requests do not wait long. The result is sent in pieces, one after each step, so that no message is
large and none keeps the engine from its other work.
"""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.architectures.sites import PATTERN, site_name
from engine.core.errors import EngineError, InferenceError, InvalidRequestError
from engine.core.interfaces.interp import AttentionPattern, Lens
from engine.core.interfaces.request import TokenDelta
from engine.core.tensor_file import packed_header
from engine.runtime.interp.attribution import attribution_of
from engine.runtime.interp.probe import Probe
from engine.runtime.interp.taps import Tappable
from engine.runtime.model_runner import F32, I32
from engine.runtime.outputs import refusal, too_late
from engine.runtime.sequence import Sequence

SCORES_PER_TURN = 2**20  # of one head


class Pattern:
    """Attention weights from queries and keys after their norms and RoPE: (P, N, H) and (K, M, H)
    -> (P, heads, K), the weights of positions 0 .. K - 1 for the queries at `places`. Weights of
    later positions are 0. `run` computes them, a few queries at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        q: F32,
        k: F32,
        places: list[int],
        heads: Iterable[int],
    ) -> None:
        if config.attention_sinks or config.latent is not None or config.alibi_bias is not None:
            raise InvalidRequestError(
                "interp.attention: this model's attention has sinks, latents or ALiBi, whose "
                "patterns are not computed.",
                param="interp",
            )
        self._heads = list(heads)
        if not all(0 <= head < q.shape[1] for head in self._heads):
            raise InvalidRequestError(
                f"interp.attention.heads must be within 0..{q.shape[1] - 1}.", param="interp"
            )
        self._config, self._q, self._k, self.places = config, q, k, places
        self._window = config.layer(layer).window
        self.weights: F32 = np.zeros((len(places), len(self._heads), len(k)), np.float32)

    def run(self) -> Iterator[None]:
        rows = max(1, SCORES_PER_TURN // max(1, len(self._k)))
        for start in range(0, len(self.places), rows):
            self._compute(slice(start, start + rows))
            yield

    def _compute(self, rows: slice) -> None:
        config, q, k = self._config, self._q[rows], self._k
        positions, own = np.arange(len(k)), np.array(self.places[rows])[:, None]
        hidden = positions > own
        if self._window is not None:
            hidden |= positions <= own - self._window
        group = q.shape[1] // k.shape[1]
        for index, head in enumerate(self._heads):
            scores = (q[:, head] @ k[:, head // group].T) * np.float32(config.attention_scale)
            if (cap := config.attention_softcap) is not None:
                scores = cap * np.tanh(scores / cap)
            scores = np.where(hidden, -np.inf, scores)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            self.weights[rows, index] = scores / scores.sum(axis=1, keepdims=True)


ROWS_PER_TURN = 32  # of the LM head
PIECE_BYTES = 4 * 2**20  # of a result in one message
Tensor = tuple[str, NDArray[Any]]
_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}


class Reports:
    """The last deltas of sequences whose results are still being made."""

    def __init__(self) -> None:
        self._waiting: list[
            tuple[Sequence, Probe, TokenDelta, Iterator[TokenDelta | None] | None]
        ] = []
        self._last_tenant = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def probes(self) -> Iterator[tuple[str, Probe]]:
        return ((seq.tenant, probe) for seq, probe, *_ in self._waiting)

    def hold(self, seq: Sequence, probe: Probe, delta: TokenDelta) -> None:
        """Keep the last delta of a sequence until its result is made."""
        probe.token_ids = seq.token_ids
        self._waiting.append((seq, probe, delta, None))

    def advance(self, runner: Tappable) -> list[TokenDelta]:
        """Work on a result. Tenants take turns, and so do the results of a tenant. Returns a delta
        with a piece of the result, if one is done.
        """
        seq, probe, delta, work = self._waiting.pop(self._next())
        self._last_tenant = seq.tenant
        try:
            if probe.deadline is not None and time.monotonic() > probe.deadline:
                raise too_late(True, 0.0)
            work = work or _work(seq, probe, delta, runner)
            made = next(work)
        except EngineError as error:
            return [refusal(seq.request_id, seq.choice, error)]
        except Exception as error:
            failure = InferenceError(f"The results of this request could not be made: {error}")
            return [refusal(seq.request_id, seq.choice, failure)]
        if made is None or made.finish_reason is None:
            self._waiting.append((seq, probe, delta, work))
        return [] if made is None else [made]

    def _next(self) -> int:
        tenants = [seq.tenant for seq, *_ in self._waiting]
        others = (n for n, tenant in enumerate(tenants) if tenant != self._last_tenant)
        return next(others, 0)

    def drop(self, request_id: str) -> None:
        """Forget the results of an aborted request."""
        self._waiting = [each for each in self._waiting if each[0].request_id != request_id]


def _work(
    seq: Sequence, probe: Probe, last: TokenDelta, runner: Tappable
) -> Iterator[TokenDelta | None]:
    """Makes the result of a sequence, and yields None after each piece of work. Then it yields the
    deltas with the pieces of the result, and `last` with the last one.
    """
    request, count = probe.request, len(seq.tokens) - 1
    tensors: list[Tensor] = []
    facts: dict[str, Any] = {"token_ids": probe.token_ids, "num_prompt": seq.num_prompt}
    facts["captures"] = []
    for index, each in enumerate(request.captures):
        places, values = probe.values(each.site, each.span, count)
        facts["captures"].append({"site": each.site, "positions": places, "tensor": f"{index}"})
        tensors.append((f"{index}", values))
    if request.lens is not None:
        lens = _LensWork(probe, request.lens, count)
        for _ in lens.run(runner):
            yield None
        facts["lens"] = {"layers": list(request.lens.layers), "positions": lens.places}
        tensors += [("lens.tokens", lens.tokens), ("lens.logprobs", lens.logprobs)]
    if request.attention is not None:
        facts["attention"] = []
        for layer in request.attention.layers:
            made = _pattern(probe, request.attention, layer, runner, count)
            for _ in made.run():
                yield None
            name = f"blocks.{layer}.{PATTERN}"
            facts["attention"].append({"site": name, "positions": made.places, "tensor": name})
            tensors.append((name, made.weights))
    if request.attribution is not None:
        facts["attribution"] = attribution_of(seq, probe, request.attribution, runner, count)
    yield from _pieces(tensors, {"interp": json.dumps(facts)}, last)


def _pieces(
    tensors: list[Tensor], metadata: dict[str, str], last: TokenDelta
) -> Iterator[TokenDelta]:
    described = [(name, _DTYPES[values.dtype], values.shape) for name, values in tensors]
    parts = [memoryview(packed_header(described, metadata))]
    parts += [
        memoryview(np.ascontiguousarray(each).data).cast("B") for _, each in tensors if each.size
    ]
    piece, sent = bytearray(), 0
    for part in parts:
        while part:
            room = PIECE_BYTES - len(piece)
            piece += part[:room]
            part = part[room:]
            if len(piece) == PIECE_BYTES:
                yield TokenDelta(
                    last.request_id, last.choice, captured=bytes(piece), captured_at=sent
                )
                sent += len(piece)
                piece = bytearray()
    yield replace(last, captured=bytes(piece), captured_at=sent)


class _LensWork:
    """The likeliest tokens that the LM head gives for the streams after layers."""

    def __init__(self, probe: Probe, lens: Lens, count: int) -> None:
        self._probe, self._lens, self._count = probe, lens, count
        name = site_name(lens.layers[0], "resid_post")
        self.places = probe.values(name, lens.span, count)[0]
        shape = (len(lens.layers), len(self.places), lens.top)
        self.tokens: I32 = np.zeros(shape, np.int32)
        self.logprobs: F32 = np.zeros(shape, np.float32)

    def run(self, runner: Tappable) -> Iterator[None]:
        lens = self._lens
        for index, layer in enumerate(lens.layers):
            name = site_name(layer, "resid_post")
            _, values = self._probe.values(name, lens.span, self._count)
            for start in range(0, len(values), ROWS_PER_TURN):
                rows = values[start : start + ROWS_PER_TURN]
                if lens.tuned:
                    matrix, bias = (np.frombuffer(data, np.float32) for data in lens.tuned[index])
                    rows = rows + rows @ matrix.reshape(len(bias), len(bias)).T + bias
                for offset, logits in enumerate(runner.unembed(rows)):
                    self._keep(index, start + offset, logits)
                yield

    def _keep(self, layer: int, place: int, logits: F32) -> None:
        count = min(self._lens.top, len(logits))
        if count < self.tokens.shape[2]:  # the vocabulary has fewer tokens
            self.tokens, self.logprobs = self.tokens[..., :count], self.logprobs[..., :count]
        best = np.argpartition(-logits, min(count, len(logits) - 1))[:count]
        best = best[np.argsort(-logits[best], kind="stable")]
        shifted = logits - logits.max()
        self.tokens[layer, place] = best
        self.logprobs[layer, place] = shifted[best] - np.log(np.exp(shifted).sum())


def _pattern(
    probe: Probe, attention: AttentionPattern, layer: int, runner: Tappable, count: int
) -> Pattern:
    places, q = probe.values(site_name(layer, "rot_q"), attention.span, count)
    _, k = probe.values(site_name(layer, "rot_k"), type(attention.span)(), count)
    heads = range(q.shape[1]) if attention.heads is None else attention.heads
    return Pattern(runner.config, layer, q, k, places, heads)
