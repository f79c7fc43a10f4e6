"""The interpretability part of a sequence: its taps in each step, and what they captured."""

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.backends.custom.architectures.sites import Site, site_name
from engine.backends.custom.runtime.interp.taps import (
    ADD,
    CAPTURE,
    CLAMP,
    EXTRA_COLUMNS,
    PROJECT_OUT,
    SCALE,
    SET,
    Taps,
)
from engine.backends.custom.runtime.model_runner import F32, I32
from engine.core.errors import InvalidRequestError, PayloadTooLargeError
from engine.core.interfaces.interp import Capture, Edit, InterpRequest, Span

_KINDS = {"add": ADD, "scale": SCALE, "set": SET, "project_out": PROJECT_OUT, "clamp": CLAMP}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A capture or an edit with its site's number and its positions in the sequence."""

    site: int
    places: frozenset[int] | None
    phase: str
    kind: int = CAPTURE
    scale: float = 1.0
    first_vector: int = 0
    # The vector of each position, if positions have vectors of their own
    vector_of: dict[int, int] | None = None

    def wanted(self, start: int, end: int, num_prompt: int) -> I32:
        """The positions from `start` to `end` - 1 at which it applies."""
        if self.phase == "prompt":
            end = min(end, num_prompt)
        elif self.phase == "decode":
            start = max(start, num_prompt)
        if self.places is None:
            return np.arange(start, max(start, end), dtype=np.int32)
        return np.array(sorted(each for each in self.places if start <= each < end), np.int32)


class Probe:
    """What a request reads and changes. Made when the request is taken in, which checks it."""

    def __init__(
        self, request: InterpRequest, sites: tuple[Site, ...], num_prompt: int, max_tokens: int
    ) -> None:
        self.request = request = with_layers(request, sites)
        self.sites = sites
        self.widths = tuple(site.width for site in sites)
        self._num_prompt = num_prompt
        self._numbers = {site.name: index for index, site in enumerate(sites)}
        self._vectors: list[F32] = []
        self._edits = [self._edit(edit) for edit in request.edits]
        wanted = list(dict.fromkeys(request.captures + derived_captures(request, sites)))
        self._captures = [
            _Placed(self._site(each.site), each.span.resolved(num_prompt), each.span.phase)
            for each in wanted
        ]
        # While no position differs from others, all decode rows of a place in the batch are alike.
        self._is_steady = all(each.places is None for each in (*self._edits, *self._captures))
        self._decoding: tuple[int, Taps | None] | None = None  # the place, and its taps
        self._found: dict[tuple[int, int], F32] = {}  # by site and position
        self.num_seen = 0  # positions before this one have been captured
        self._check_size(wanted, num_prompt + max_tokens - 1)

    def _check_size(self, wanted: list[Capture], num_tokens: int) -> None:
        total = 0
        for each, placed in zip(wanted, self._captures, strict=True):
            width = self.sites[placed.site].width
            total += 4 * width * each.span.count(self._num_prompt, num_tokens)
        self.num_bytes = total
        if total > self.request.max_bytes:
            raise PayloadTooLargeError(
                f"interp: the request could capture {total:,} bytes, and may capture"
                f" {self.request.max_bytes:,}; ask for fewer sites or positions.",
                param="interp",
            )

    @property
    def reads(self) -> bool:
        return self.request.reads

    @property
    def needs_prompt(self) -> bool:
        """Whether positions of the prompt are captured that have not been computed yet. Then cached
        blocks can't be used.
        """
        if self.num_seen >= self._num_prompt:
            return False
        span = (self.num_seen, self._num_prompt, self._num_prompt)
        return any(len(each.wanted(*span)) for each in self._captures)

    @property
    def needs_logits(self) -> bool:
        """Whether prompt positions must be computed as if their logits were needed."""
        span = (0, self._num_prompt - 1, self._num_prompt)
        return any(self.sites[c.site].is_late and len(c.wanted(*span)) for c in self._captures)

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
        kinds: list[int] = []
        rows: list[I32] = []
        scales: list[float] = []
        num_captured = 0
        for each in (*self._edits, *self._captures):
            places = each.wanted(start, start + length, self._num_prompt)
            if not len(places):
                continue
            if each.kind == CAPTURE:
                row = np.arange(num_captured, num_captured + len(places), dtype=np.int32)
                num_captured += len(places)
            elif each.vector_of is not None:
                row = np.array([each.vector_of[place] for place in places.tolist()], np.int32)
            else:
                row = np.full(len(places), each.first_vector, np.int32)
            sites.append(np.full(len(places), each.site, np.int32))
            tokens.append(places + np.int32(first_token - start))
            kinds += [each.kind] * len(places)
            scales += [each.scale] * len(places)
            rows.append(row)
        if not sites:
            return None
        return Taps(
            np.concatenate(sites),
            np.concatenate(tokens),
            np.array(kinds, np.int32),
            np.concatenate(rows),
            np.array(scales, np.float32),
            tuple(self._vectors),
            num_captured,
        )

    def num_captures(self, start: int, length: int) -> int:
        """How many rows a step captures for these positions."""
        spans = (each.wanted(start, start + length, self._num_prompt) for each in self._captures)
        return sum(map(len, spans))

    def take(self, start: int, length: int, captured: F32) -> None:
        """Keep what a finished row captured."""
        taken = 0
        for each in self._captures:
            width = self.widths[each.site]
            for place in each.wanted(start, start + length, self._num_prompt).tolist():
                row = captured[taken, :width]
                taken += 1
                self._found[each.site, place] = row.copy()
        if start <= self.num_seen:
            self.num_seen = max(self.num_seen, start + length)

    def values(self, name: str, span: Span, num_tokens: int) -> tuple[list[int], F32]:
        """The captured positions of a site among the first `num_tokens`, and their values."""
        site = self._site(name)
        placed = _Placed(site, span.resolved(self._num_prompt), span.phase)
        places = placed.wanted(0, num_tokens, self._num_prompt).tolist()
        places = [place for place in places if (site, place) in self._found]
        shape = self.sites[site].shape
        if not places:
            return [], np.zeros((0, *shape), np.float32)
        rows = np.stack([self._found[site, place] for place in places])
        return places, rows.reshape(len(places), *shape)

    def _site(self, name: str) -> int:
        if name not in self._numbers:
            raise InvalidRequestError(
                f"interp: this model has no site '{name}'; GET /v1/interp/sites lists its sites.",
                param="interp",
            )
        return self._numbers[name]

    def _edit(self, edit: Edit) -> _Placed:
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
        places_of = edit.span.resolved(self._num_prompt)
        kind = _KINDS[edit.kind]
        return _Placed(index, places_of, edit.span.phase, kind, edit.scale, first, vector_of)


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
