"""The interpretability part of a sequence: its taps in each step, the positions that a capture or
an edit is for, and what was captured.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.architectures.sites import Site, site_name
from engine.core.errors import InferenceError, InvalidRequestError
from engine.core.interfaces.interp import Capture, Edit, InterpRequest, Span
from engine.runtime.interp.sizes import account_of
from engine.runtime.interp.taps import (
    ADD,
    CAPTURE,
    CLAMP,
    EXTRA_COLUMNS,
    PROJECT_OUT,
    SCALE,
    SET,
    Taps,
)
from engine.runtime.model_runner import F32, I32, Bools
from engine.runtime.sequence import Row

_KINDS = {"add": ADD, "scale": SCALE, "set": SET, "project_out": PROJECT_OUT, "clamp": CLAMP}
# What the taps of one row of a step may take. It bounds how many positions the row has.
STEP_BYTES = 64 * 2**20
_TAP_BYTES = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """A capture or an edit with its site's number and its positions in the sequence."""

    site: int
    first: int
    end: int
    places: I32 | None  # sorted; None: all from `first` to `end` - 1
    kind: int = CAPTURE
    scale: float = 1.0
    first_vector: int = 0
    num_vectors: int = 0
    # The vector of each position, if positions have vectors of their own
    vector_of: dict[int, int] | None = None

    def among(self, start: int, end: int) -> tuple[int, int]:
        """The range of indices in `places` whose positions are from `start` to `end` - 1."""
        if self.places is None:
            low = min(max(start, self.first), self.end)
            return low - self.first, max(low, min(end, self.end)) - self.first
        low, high = np.searchsorted(self.places, (start, max(start, end))).tolist()
        return low, high

    def wanted(self, start: int, end: int) -> I32:
        """The positions from `start` to `end` - 1 at which it applies."""
        low, high = self.among(start, end)
        if self.places is None:
            return np.arange(self.first + low, self.first + high, dtype=np.int32)
        return self.places[low:high]

    def __len__(self) -> int:
        return self.end - self.first if self.places is None else len(self.places)


def placed(site: int, span: Span, num_prompt: int, num_tokens: int) -> Placed:
    """The positions of a span in a sequence of at most `num_tokens`."""
    first = num_prompt if span.phase == "decode" else 0
    end = min(num_prompt, num_tokens) if span.phase == "prompt" else num_tokens
    chosen = span.resolved(num_prompt)
    if chosen is None:
        return Placed(site, first, max(first, end), None)
    places = np.array(sorted(each for each in chosen if first <= each < end), np.int32)
    return Placed(site, first, end, places)


def joined(parts: list[Placed], num_tokens: int) -> Placed:
    """All positions of captures of one site, each once."""
    first = parts[0]
    if len(parts) == 1:
        return first
    is_wanted = np.zeros(num_tokens, np.bool_)
    for each in parts:
        is_wanted[slice(each.first, each.end) if each.places is None else each.places] = True
    if is_wanted.all():
        return Placed(first.site, 0, num_tokens, None)
    return Placed(first.site, 0, num_tokens, np.flatnonzero(is_wanted).astype(np.int32))


class Kept:
    """What was captured at a site. `is_known` says which of its positions have values."""

    def __init__(self, where: Placed, width: int) -> None:
        self.where = where
        self.is_known: Bools = np.zeros(len(where), np.bool_)
        self._width = width
        self._rows: F32 | None = None  # made when the first value arrives

    def lacks(self, start: int, end: int) -> bool:
        """Whether a position from `start` to `end` - 1 has no value yet."""
        low, high = self.where.among(start, end)
        return not self.is_known[low:high].all()

    def keep(self, start: int, end: int, rows: F32, is_computed: Bools | None) -> None:
        """Keep the values of positions from `start` to `end` - 1 that are not known. A value that
        is computed again after a preemption is the same. `is_computed` says which positions of the
        step have values at all; None: all of them.
        """
        low, high = self.where.among(start, end)
        if low == high:
            return
        if self._rows is None:
            self._rows = np.empty((len(self.where), self._width), np.float32)
        is_new = ~self.is_known[low:high]
        if is_computed is not None:
            is_new &= is_computed[self.where.wanted(start, end) - start]
        self._rows[low:high][is_new] = rows[is_new, : self._width]
        self.is_known[low:high] |= is_new

    def values(self, places: I32) -> F32 | None:
        """The values at positions, which are sorted. None if one of them was not captured."""
        where = self.where
        if where.places is None:
            index = places - np.int32(where.first)
        else:
            index = np.searchsorted(where.places, places).astype(np.int32)
        if self._rows is None or not self.is_known[index].all():
            return None
        first, last = int(index[0]), int(index[-1])
        is_run = last - first + 1 == len(index)
        found: F32 = self._rows[first : last + 1] if is_run else self._rows[index]
        return found


class Probe:
    """What a request reads and changes. Made when the request is taken in, which checks it, and
    counts what it takes before that is allocated.
    """

    def __init__(
        self,
        request: InterpRequest,
        sites: tuple[Site, ...],
        num_prompt: int,
        max_tokens: int,
        num_choices: int = 1,
    ) -> None:
        self.request = request = with_layers(request, sites)
        self.deadline: float | None = None  # when the request must have ended
        self.token_ids: list[int] = []  # all tokens of the sequence, when it has ended
        self.sites = sites
        self.widths = tuple(site.width for site in sites)
        self._num_prompt, self._num_tokens = num_prompt, num_prompt + max_tokens - 1
        self._numbers = {site.name: index for index, site in enumerate(sites)}
        captures = self._captures_by_site()
        counts = {each.site: len(each) for each in captures}
        shape = (num_prompt, self._num_tokens, num_choices)
        self.num_bytes = account_of(request, sites, counts, *shape).total
        self._vectors: list[F32] = []
        self._edits = [self._edit(edit) for edit in request.edits]
        self._check_lens()
        self._kept = {each.site: Kept(each, self.widths[each.site]) for each in captures}
        self._captures = captures
        # While no position differs from others, all decode rows of a place in the batch are alike.
        taps = (*self._edits, *captures)
        self._is_steady = all(map(self._is_even, taps))
        self._decoding: tuple[int, Taps | None] | None = None  # the place, and its taps
        self.max_row = self._max_row()

    def _captures_by_site(self) -> list[Placed]:
        """For each site that is read, all positions at which it is, each once."""
        request, found = self.request, dict[int, list[Placed]]()
        for each in dict.fromkeys(request.captures + derived_captures(request, self.sites)):
            site = self._site(each.site)
            where = placed(site, each.span, self._num_prompt, self._num_tokens)
            found.setdefault(site, []).append(where)
        return [joined(parts, self._num_tokens) for parts in found.values()]

    def _is_even(self, each: Placed) -> bool:
        """Whether it applies to all positions of the output, or to none."""
        low, high = each.among(self._num_prompt, self._num_tokens)
        return high - low in (0, self._num_tokens - self._num_prompt)

    def _max_row(self) -> int:
        """How many positions one row of a step may have."""
        taps = (*self._edits, *self._captures)
        widest = max((self.widths[each.site] for each in taps), default=0)
        vectors = 2 * len(self._edits) + len(self._captures)
        each = len(taps) * _TAP_BYTES + 4 * (widest + EXTRA_COLUMNS) * vectors
        return max(1, STEP_BYTES // max(1, each))

    def _check_lens(self) -> None:
        lens = self.request.lens
        if lens is None:
            return
        width = self.widths[self._site(site_name(lens.layers[0], "resid_post"))]
        sizes = (4 * width * width, 4 * width)
        if any((len(a), len(b)) != sizes for a, b in lens.tuned):
            raise InvalidRequestError(
                f"interp.lens: the tuned lens is for another model; this model's streams have"
                f" {width} values.",
                param="interp.lens",
            )

    @property
    def reads(self) -> bool:
        return self.request.reads

    def lacks(self, end: int) -> bool:
        """Whether positions before `end` are captured and have not been computed yet. Then cached
        blocks can't be used.
        """
        return any(each.lacks(0, end) for each in self._kept.values())

    def needs_logits(self, start: int, end: int) -> bool:
        """Whether positions from `start` to `end` - 1 must be computed as if their logits were
        needed.
        """
        kept = self._kept.values()
        return any(self.sites[each.where.site].is_late and each.lacks(start, end) for each in kept)

    def root(self, namespace: str) -> str:
        """The namespace of the prefix cache for a sequence with these edits. Only sequences with
        the same edits share it.
        """
        edits = self.request.edits
        if not edits:
            return namespace
        digest = hashlib.sha256(msgspec.msgpack.encode(edits))
        if any(edit.span.depends_on_prompt for edit in edits):
            digest.update(str(self._num_prompt).encode())
        return f"{namespace}\0{digest.hexdigest()}"

    def taps(self, start: int, length: int, first_token: int) -> Taps | None:
        """The taps of a row that computes `length` positions from `start` on. `first_token` is the
        index of its first token in the step.
        """
        if length > 1 or start < self._num_prompt or not self._is_steady:
            return self._taps(start, length, first_token)
        if self._decoding is None or self._decoding[0] != first_token:
            self._decoding = first_token, self._taps(start, length, first_token)
        return self._decoding[1]

    def _taps(self, start: int, length: int, first_token: int) -> Taps | None:
        sites: list[I32] = []
        tokens: list[I32] = []
        kinds: list[I32] = []
        rows: list[I32] = []
        scales: list[F32] = []
        vectors: list[F32] = []
        num_captured = 0
        for each in (*self._edits, *self._captures):
            places = each.wanted(start, start + length)
            if not (count := len(places)):
                continue
            if each.kind == CAPTURE:
                row = np.arange(num_captured, num_captured + count, dtype=np.int32)
                num_captured += count
            elif each.vector_of is not None:
                row = np.arange(len(vectors), len(vectors) + count, dtype=np.int32)
                vectors += [self._vectors[each.vector_of[place]] for place in places.tolist()]
            else:
                row = np.full(count, len(vectors), np.int32)
                first = each.first_vector
                vectors += self._vectors[first : first + each.num_vectors]
            sites.append(np.full(count, each.site, np.int32))
            tokens.append(places + np.int32(first_token - start))
            kinds.append(np.full(count, each.kind, np.int32))
            scales.append(np.full(count, each.scale, np.float32))
            rows.append(row)
        if not sites:
            return None
        return Taps(
            np.concatenate(sites),
            np.concatenate(tokens),
            np.concatenate(kinds),
            np.concatenate(rows),
            np.concatenate(scales),
            tuple(vectors),
            num_captured,
        )

    def num_captures(self, start: int, length: int) -> int:
        """How many rows a step captures for these positions."""
        spans = (each.among(start, start + length) for each in self._captures)
        return sum(high - low for low, high in spans)

    def take(self, row: Row, captured: F32) -> None:
        """Keep what a finished row captured."""
        start, end, taken = row.start, row.start + row.length, 0
        has_logits = np.zeros(row.length, np.bool_)
        has_logits[: row.num_scored] = True
        has_logits[-1] |= row.samples
        for each in self._captures:
            low, high = each.among(start, end)
            rows, taken = captured[taken : taken + high - low], taken + high - low
            is_late = self.sites[each.site].is_late
            self._kept[each.site].keep(start, end, rows, has_logits if is_late else None)

    def values(self, name: str, span: Span, num_tokens: int) -> tuple[list[int], F32]:
        """The captured positions of a site among the first `num_tokens`, and their values."""
        site = self._site(name)
        places = placed(site, span, self._num_prompt, num_tokens).wanted(0, num_tokens)
        shape = self.sites[site].shape
        if not len(places):
            return [], np.zeros((0, *shape), np.float32)
        rows = self._kept[site].values(places)
        if rows is None:
            raise InferenceError(f"The values of {name} were not computed for all positions.")
        return places.tolist(), rows.reshape(len(places), *shape)

    def _site(self, name: str) -> int:
        if name not in self._numbers:
            raise InvalidRequestError(
                f"interp: this model has no site '{name}'; GET /v1/interp/sites lists its sites.",
                param="interp",
            )
        return self._numbers[name]

    def _edit(self, edit: Edit) -> Placed:
        index = self._site(edit.site)
        site, first = self.sites[index], len(self._vectors)
        if not site.can_edit:
            raise InvalidRequestError(
                f"interp: {edit.site} can be captured but not edited.", param="interp"
            )
        for data in edit.vectors:
            vector = np.frombuffer(data, np.float32)
            if len(vector) != site.width or not np.isfinite(vector).all():
                raise InvalidRequestError(
                    f"interp: a vector for {edit.site} needs {site.width} finite numbers.",
                    param="interp",
                )
            extra = np.array([edit.bias, edit.threshold], np.float32)
            assert len(extra) == EXTRA_COLUMNS
            self._vectors.append(np.concatenate([vector, extra]))
        if not edit.vectors:  # a scale reads none, but its row must exist
            self._vectors.append(np.zeros(EXTRA_COLUMNS, np.float32))
        vector_of = None
        if edit.kind == "set" and len(edit.vectors) > 1:
            places = [p + self._num_prompt if p < 0 else p for p in edit.span.positions or ()]
            if len(places) != len(edit.vectors):
                raise InvalidRequestError(
                    f"interp: {edit.site} has {len(edit.vectors)} vectors to patch"
                    f" {len(places)} positions with.",
                    param="interp",
                )
            vector_of = {place: first + offset for offset, place in enumerate(places)}
        where = placed(index, edit.span, self._num_prompt, self._num_tokens)
        return dataclasses.replace(
            where,
            kind=_KINDS[edit.kind],
            scale=edit.scale,
            first_vector=first,
            num_vectors=len(self._vectors) - first,
            vector_of=vector_of,
        )


def with_layers(request: InterpRequest, sites: tuple[Site, ...]) -> InterpRequest:
    """The request with the numbers of the layers, if its lens is for all layers."""
    if request.lens is None or request.lens.layers:
        return request
    layers = tuple(site.layer for site in sites if site.part == "resid_post")
    return replace(request, lens=replace(request.lens, layers=layers))


def derived_captures(request: InterpRequest, sites: tuple[Site, ...]) -> tuple[Capture, ...]:
    """What must be captured for the request's lens, attention and attribution."""
    found: list[Capture] = []
    if request.lens is not None:
        for layer in request.lens.layers:
            found.append(Capture(site_name(layer, "resid_post"), request.lens.span))
    if request.attention is not None:
        for layer in request.attention.layers:
            found.append(Capture(site_name(layer, "rot_q"), request.attention.span))
            found.append(Capture(site_name(layer, "rot_k")))  # of all positions
    if request.attribution is not None and request.attribution.method == "direct":
        span = Span((request.attribution.position,))
        last = max(site.layer for site in sites)
        parts = ("attn_out", "mlp_out")
        found += [Capture(site.name, span) for site in sites if site.part in (*parts, "embed")]
        found.append(Capture(site_name(0, "resid_pre"), span))
        found.append(Capture(site_name(last, "resid_post"), span))
    return tuple(found)
