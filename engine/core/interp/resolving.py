"""Turns the `interp` object of a client into the message for the engine: names become vectors."""

import math
from array import array
from collections.abc import Callable

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.interp import (
    Attention,
    Attribution,
    Capture,
    Edit,
    EditKind,
    InterpRequest,
    Lens,
    Span,
)
from engine.core.interp.results import Result
from engine.core.interp.spec import EditSpec, InterpSpec, LensSpec
from engine.core.interp.vectors import VectorStore, column, floats, packed_floats, row, scalar

# Finds the stored result of an earlier request of the same client, by its id.
FindResult = Callable[[str], Result]
_KINDS: dict[str, EditKind] = {"patch": "set", "ablate": "set"}


def resolved(
    spec: InterpSpec, store: VectorStore, find: FindResult, max_bytes: int
) -> InterpRequest:
    """The message for the engine. Raises `EngineError` if a name is unknown or a vector is bad. The
    caller tokenizes a target of attribution that is a text.
    """
    captures = tuple(Capture(each.site, each.span) for each in spec.capture)
    if spec.features is not None:
        site = spec.features.site or sae_site(store, spec.features.sae)
        captures = (*captures, Capture(site, spec.features.span))
    attention, attribution = spec.attention, spec.attribution
    return InterpRequest(
        captures,
        tuple(edit for each in spec.edit for edit in _edits(each, store, find)),
        None if spec.lens is None else _lens(spec.lens, store),
        None
        if attention is None
        else Attention(
            tuple(attention.layers),
            None if attention.heads is None else tuple(attention.heads),
            attention.span,
        ),
        None
        if attribution is None
        else Attribution(
            attribution.target if isinstance(attribution.target, int) else None,
            attribution.position,
            attribution.method,
        ),
        max_bytes,
    )


def sae_site(store: VectorStore, name: str) -> str:
    """The site that an autoencoder was made for."""
    _, metadata = store.load(name)
    if not (site := metadata.get("site") or metadata.get("hook_name")):
        raise InvalidRequestError(
            f"interp: the file of '{name}' does not say its site; send `site`.", param="interp"
        )
    return site


def _lens(lens: LensSpec, store: VectorStore) -> Lens:
    layers = () if lens.layers == "all" else tuple(lens.layers)
    if lens.tuned is None:
        return Lens(layers, lens.top, lens.span)
    tensors, _ = store.load(lens.tuned)
    if not layers:
        layers = tuple(sorted(int(name[:-7]) for name in tensors if name.endswith(".weight")))
    tuned = []
    for layer in layers:
        if f"{layer}.weight" not in tensors:
            raise InvalidRequestError(
                f"interp.lens: the tuned lens '{lens.tuned}' has no layer {layer}.", param="interp"
            )
        bias = tensors.get(f"{layer}.bias")
        weight = tensors[f"{layer}.weight"]
        zeros = bytes(4 * weight.shape[0])
        tuned.append((floats(weight), zeros if bias is None else floats(bias)))
    return Lens(layers, lens.top, lens.span, tuple(tuned))


def _edits(edit: EditSpec, store: VectorStore, find: FindResult) -> list[Edit]:
    span, scale = edit.span, edit.scale
    if edit.sae is not None and edit.feature is not None:
        return [_feature_edit(edit, edit.sae, edit.feature, store)]
    if edit.source is not None:
        result = find(edit.source.id)
        site = edit.source.site or edit.site
        places, rows = result.rows(site, edit.source.positions)
        if edit.positions != "all":
            given = span.positions or ()
            if len(given) != len(rows):
                raise InvalidRequestError(
                    f"interp: {len(rows)} captured positions can't patch {len(given)} positions.",
                    param="interp",
                )
            places = list(given)
        spans = Span(tuple(places), edit.phase)
        return [Edit(edit.site, "set", scale, tuple(rows), spans)]
    kind: EditKind = _KINDS.get(edit.op, edit.op)  # type: ignore[arg-type]
    if edit.op == "scale":
        return [Edit(edit.site, kind, scale, (), span)]
    if edit.op == "ablate" and edit.vector is None:
        return [Edit(edit.site, "scale", 0.0, (), span)]
    vector = _vector(edit, store)
    if edit.op == "project_out":
        vector = _unit(vector, edit.site)
    return [Edit(edit.site, kind, scale, (vector,), span)]


def _vector(edit: EditSpec, store: VectorStore) -> bytes:
    if isinstance(edit.vector, list):
        return packed_floats(edit.vector)
    assert edit.vector is not None
    tensors, _ = store.load(edit.vector)
    if edit.site not in tensors:
        known = ", ".join(list(tensors)[:8])
        raise InvalidRequestError(
            f"interp: vector '{edit.vector}' is not for {edit.site}, but for: {known}.",
            param="interp",
        )
    return floats(tensors[edit.site])


def _unit(vector: bytes, site: str) -> bytes:
    values = array("f")
    values.frombytes(vector)
    length = math.sqrt(math.fsum(each * each for each in values))
    if not length:
        raise InvalidRequestError(f"interp: {site}: the vector is zero.", param="interp")
    return array("f", [each / length for each in values]).tobytes()


def _feature_edit(edit: EditSpec, name: str, feature: int, store: VectorStore) -> Edit:
    """Steering adds the decoder's vector. Clamping sets the feature to `scale`: the encoder reads
    it, and the decoder's vector makes up the difference.
    """
    tensors, _ = store.load(name)
    for needed in ("W_enc", "W_dec"):
        if needed not in tensors:
            raise InvalidRequestError(
                f"interp: '{name}' is no sparse autoencoder: it has no {needed}.", param="interp"
            )
    decoder = row(tensors["W_dec"], feature)
    if edit.op == "add":
        return Edit(edit.site, "add", edit.scale, (decoder,), edit.span)
    if edit.op == "project_out":
        return Edit(edit.site, "project_out", edit.scale, (_unit(decoder, edit.site),), edit.span)
    encoder = column(tensors["W_enc"], feature)
    bias = scalar(tensors.get("b_enc"), feature)
    if (centre := tensors.get("b_dec")) is not None:  # the encoder reads x - b_dec
        read, middle = array("f"), array("f")
        read.frombytes(encoder)
        middle.frombytes(floats(centre))
        bias -= math.fsum(a * b for a, b in zip(read, middle, strict=True))
    threshold = scalar(tensors.get("threshold"), feature)
    vectors = (encoder, decoder)
    return Edit(edit.site, "clamp", edit.scale, vectors, edit.span, bias, threshold)
