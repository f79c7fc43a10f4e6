"""What a request gets back at its end: captured values, lens, attention patterns, attribution.

Lens and attribution need the LM head. A few rows of it are computed after each step, so that other
requests do not wait long.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.backends.custom.architectures.sites import PATTERN, site_name
from engine.backends.custom.runtime.interp.attention import pattern
from engine.backends.custom.runtime.interp.attribution import attribution_of
from engine.backends.custom.runtime.interp.probe import Probe
from engine.backends.custom.runtime.interp.taps import Tappable
from engine.backends.custom.runtime.model_runner import F32
from engine.backends.custom.runtime.outputs import refusal
from engine.backends.custom.runtime.sequence import Sequence
from engine.core.errors import EngineError, InferenceError
from engine.core.interfaces.interp import Lens
from engine.core.interfaces.request import TokenDelta
from engine.core.tensor_file import StoredTensor, pack_tensors

ROWS_PER_TURN = 32  # of the LM head


class Reports:
    """The last deltas of sequences whose results are still being made."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence, TokenDelta, Iterator[bytes | None] | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, seq: Sequence, delta: TokenDelta) -> None:
        """Keep the last delta of a sequence until its result is made."""
        self._waiting.append((seq, delta, None))

    def advance(self, runner: Tappable) -> list[TokenDelta]:
        """Work on the oldest result. Returns its delta if it is done."""
        seq, delta, work = self._waiting[0]
        try:
            if work is None:
                work = _work(seq, runner)
                self._waiting[0] = (seq, delta, work)
            made = next(work)
        except EngineError as error:
            del self._waiting[0]
            return [refusal(seq.request_id, seq.choice, error)]
        except Exception as error:
            del self._waiting[0]
            failure = InferenceError(f"The results of this request could not be made: {error}")
            return [refusal(seq.request_id, seq.choice, failure)]
        if made is None:
            return []
        del self._waiting[0]
        return [replace(delta, captured=made)]

    def drop(self, request_id: str) -> None:
        """Forget the results of an aborted request."""
        self._waiting = [each for each in self._waiting if each[0].request_id != request_id]


def _work(seq: Sequence, runner: Tappable) -> Iterator[bytes | None]:
    """Makes the result of a sequence, and yields None after each piece of work."""
    probe = seq.probe
    assert probe is not None
    request, count = probe.request, len(seq.tokens) - 1
    tensors: list[StoredTensor] = []
    facts: dict[str, Any] = {"token_ids": seq.token_ids, "num_prompt": seq.num_prompt}
    facts["captures"] = []
    for index, each in enumerate(request.captures):
        places, values = probe.values(each.site, each.span, count)
        facts["captures"].append({"site": each.site, "positions": places, "tensor": f"{index}"})
        tensors.append(_stored(f"{index}", values))
    if request.lens is not None:
        facts["lens"] = found = []
        for rows in _lens(probe, request.lens, runner, count):
            found += rows
            yield None
    if request.attention is not None:
        facts["attention"] = []
        for layer in request.attention.layers:
            places, weights = _pattern(probe, layer, runner, count)
            name = f"blocks.{layer}.{PATTERN}"
            facts["attention"].append({"site": name, "positions": places, "tensor": name})
            tensors.append(_stored(name, weights))
            yield None
    if request.attribution is not None:
        facts["attribution"] = attribution_of(seq, probe, request.attribution, runner, count)
    yield pack_tensors(tensors, {"interp": json.dumps(facts)})


def _stored(name: str, values: F32) -> StoredTensor:
    data = np.ascontiguousarray(values, np.float32)
    return StoredTensor(name, "F32", data.shape, data.tobytes())


def _lens(probe: Probe, lens: Lens, runner: Tappable, count: int) -> Iterator[list[dict[str, Any]]]:
    for index, layer in enumerate(lens.layers):
        places, values = probe.values(site_name(layer, "resid_post"), lens.span, count)
        if lens.tuned:
            matrix, bias = (np.frombuffer(data, np.float32) for data in lens.tuned[index])
            width = values.shape[1]
            values = values + values @ matrix.reshape(width, width).T + bias
        for start in range(0, len(places), ROWS_PER_TURN):
            logits = runner.unembed(values[start : start + ROWS_PER_TURN])
            rows = zip(places[start : start + ROWS_PER_TURN], logits, strict=True)
            yield [{"layer": layer, "position": p, "top": _top(row, lens.top)} for p, row in rows]


def _top(logits: F32, count: int) -> list[tuple[int, float]]:
    best = np.argpartition(-logits, min(count, len(logits) - 1))[:count]
    best = best[np.argsort(-logits[best], kind="stable")]
    shifted = logits - logits.max()
    logprobs = shifted[best] - np.log(np.exp(shifted).sum())
    return list(zip(best.tolist(), logprobs.tolist(), strict=True))


def _pattern(probe: Probe, layer: int, runner: Tappable, count: int) -> tuple[list[int], F32]:
    attention = probe.request.attention
    assert attention is not None
    places, q = probe.values(site_name(layer, "rot_q"), attention.span, count)
    _, k = probe.values(site_name(layer, "rot_k"), type(attention.span)(), count)
    heads = range(q.shape[1]) if attention.heads is None else attention.heads
    return places, pattern(runner.config, layer, q, k, places, heads)
