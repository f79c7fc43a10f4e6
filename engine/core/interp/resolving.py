"""Turns the `interp` object of a client into the message for the engine: names become vectors."""

import math
import re
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.interp import (
    AttentionPattern,
    Attribution,
    Capture,
    Edit,
    EditKind,
    InterpRequest,
    Lens,
    Span,
)
from engine.core.interp.account import Account
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import EditSpec, InterpSpec, LensSpec, Source
from engine.core.interp.vectors import VectorStore, column, floats, packed_floats, row, scalar
from engine.core.tensor_file import FileTensor

# Finds the stored result of an earlier request of the same client, by its id.
FindResult = Callable[[str], InterpResult]
_TUNED = re.compile(r"\d{1,4}\.weight")
_KINDS: dict[str, EditKind] = {"patch": "set", "ablate": "set"}


def resolved(
    spec: InterpSpec, store: VectorStore, find: FindResult, max_bytes: int
) -> InterpRequest:
    """The message for the engine. Raises `EngineError` if a name is unknown or a vector is bad, or
    if all vectors together are too large; they are counted before they are read. The caller
    tokenizes a target of attribution that is a text.
    """
    return _Resolving(store, find, max_bytes).request(spec)


def _unique(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


class _Resolving:
    """Reads the vectors of one request."""

    def __init__(self, store: VectorStore, find: FindResult, max_bytes: int) -> None:
        self._store = store
        self._find = lru_cache(1)(find)  # edits often patch from one result
        self._account = Account(max_bytes)

    def _count(self, part: str, num_bytes: int) -> None:
        self._account.add(part, num_bytes)
        self._account.check()

    def _floats(self, tensor: FileTensor, part: str = "edits") -> bytes:
        self._count(part, tensor.num_bytes * (2 if part == "edits" else 1))
        return floats(tensor)

    def request(self, spec: InterpSpec) -> InterpRequest:
        captures = tuple(Capture(each.site, each.span) for each in spec.capture)
        if spec.features is not None:
            self._store.autoencoder(spec.features.sae)
            site = spec.features.site or sae_site(self._store, spec.features.sae)
            captures = (*captures, Capture(site, spec.features.span))
        attention, attribution = spec.attention, spec.attribution
        return InterpRequest(
            captures,
            tuple(self._edit(each) for each in spec.edit),
            None if spec.lens is None else self._lens(spec.lens),
            None
            if attention is None
            else AttentionPattern(
                _unique(attention.layers),
                None if attention.heads is None else _unique(attention.heads),
                attention.span,
            ),
            None
            if attribution is None
            else Attribution(
                attribution.target if isinstance(attribution.target, int) else None,
                attribution.position,
                attribution.method,
            ),
            self._account.max_bytes,
            0 if spec.features is None else spec.features.top,
        )

    def _lens(self, lens: LensSpec) -> Lens:
        layers = () if lens.layers == "all" else _unique(lens.layers)
        if lens.tuned is None:
            return Lens(layers, lens.top, lens.span)
        tensors, _ = self._store.load(lens.tuned)
        if not layers:
            layers = tuple(sorted(int(name[:-7]) for name in tensors if _TUNED.fullmatch(name)))
        tuned = []
        for layer in layers:
            if f"{layer}.weight" not in tensors:
                raise InvalidRequestError(
                    f"interp.lens: the tuned lens '{lens.tuned}' has no layer {layer}.",
                    param="interp",
                )
            bias = tensors.get(f"{layer}.bias")
            weight = tensors[f"{layer}.weight"]
            if len(weight.shape) != 2:
                raise InvalidRequestError(
                    f"interp.lens: the matrix of layer {layer} of '{lens.tuned}' has"
                    f" {len(weight.shape)} dimensions, and needs 2.",
                    param="interp",
                )
            matrix = self._floats(weight, "tuned lens")
            zeros = bytes(4 * weight.shape[0])
            tuned.append((matrix, zeros if bias is None else self._floats(bias, "tuned lens")))
        return Lens(layers, lens.top, lens.span, tuple(tuned))

    def _edit(self, edit: EditSpec) -> Edit:
        span, scale = edit.span, edit.scale
        if edit.sae is not None and edit.feature is not None:
            return self._feature_edit(edit, edit.sae, edit.feature)
        if edit.source is not None:
            return self._patch(edit, edit.source)
        kind: EditKind = _KINDS.get(edit.op, edit.op)  # type: ignore[arg-type]
        if edit.op == "scale":
            return Edit(edit.site, kind, scale, (), span)
        if edit.op == "ablate" and edit.vector is None:
            return Edit(edit.site, "scale", 0.0, (), span)
        vector = self._vector(edit)
        if edit.op == "project_out":
            vector = _unit(vector, edit.site)
        return Edit(edit.site, kind, scale, (vector,), span)

    def _patch(self, edit: EditSpec, source: Source) -> Edit:
        result = self._find(source.id)
        places, rows = result.rows(
            source.site or edit.site, source.positions, lambda size: self._count("edits", 2 * size)
        )
        if edit.positions != "all":
            given = edit.span.positions or ()
            if len(given) != len(rows):
                raise InvalidRequestError(
                    f"interp: {len(rows)} captured positions can't patch {len(given)} positions.",
                    param="interp",
                )
            places = list(given)
        return Edit(edit.site, "set", edit.scale, tuple(rows), Span(tuple(places), edit.phase))

    def _vector(self, edit: EditSpec) -> bytes:
        if isinstance(edit.vector, list):
            self._count("edits", 8 * len(edit.vector))
            return packed_floats(edit.vector)
        assert edit.vector is not None
        tensors, _ = self._store.load(edit.vector)
        if edit.site not in tensors:
            known = ", ".join(list(tensors)[:8])
            raise InvalidRequestError(
                f"interp: vector '{edit.vector}' is not for {edit.site}, but for: {known}.",
                param="interp",
            )
        return self._floats(tensors[edit.site])

    def _feature_edit(self, edit: EditSpec, name: str, feature: int) -> Edit:
        """Steering adds the decoder's vector. Clamping sets the feature to `scale`: the encoder
        reads it, and the decoder's vector makes up the difference.
        """
        tensors = self._store.autoencoder(name)
        if "W_dec" not in tensors:
            raise InvalidRequestError(
                f"interp: the sparse autoencoder '{name}' has no W_dec.", param="interp"
            )
        self._count("edits", 16 * tensors["W_dec"].shape[1])
        decoder = row(tensors["W_dec"], feature)
        if edit.op == "add":
            return Edit(edit.site, "add", edit.scale, (decoder,), edit.span)
        if edit.op == "project_out":
            unit = _unit(decoder, edit.site)
            return Edit(edit.site, "project_out", edit.scale, (unit,), edit.span)
        encoder = column(tensors["W_enc"], feature)
        bias = scalar(tensors.get("b_enc"), feature)
        if (centre := tensors.get("b_dec")) is not None:  # the encoder reads x - b_dec
            pairs = zip(array("f", encoder), array("f", self._floats(centre)), strict=True)
            bias -= math.fsum(a * b for a, b in pairs)
        threshold = scalar(tensors.get("threshold"), feature)
        vectors = (encoder, decoder)
        return Edit(edit.site, "clamp", edit.scale, vectors, edit.span, bias, threshold)


def sae_site(store: VectorStore, name: str) -> str:
    """The site that an autoencoder was made for."""
    _, metadata = store.load(name)
    if not (site := metadata.get("site") or metadata.get("hook_name")):
        raise InvalidRequestError(
            f"interp: the file of '{name}' does not say its site; send `site`.", param="interp"
        )
    return site


def _unit(vector: bytes, site: str) -> bytes:
    values = array("f")
    values.frombytes(vector)
    length = math.sqrt(math.fsum(each * each for each in values))
    if not length:
        raise InvalidRequestError(f"interp: {site}: the vector is zero.", param="interp")
    return array("f", [each / length for each in values]).tobytes()
