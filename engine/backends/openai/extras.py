"""What a server is asked for beside text: tokens of a text, and vectors."""

import base64
from typing import TYPE_CHECKING, Any

import msgspec

from engine.backends.openai.dialects import TokenApi
from engine.backends.openai.failures import unavailable
from engine.backends.openai.wire import WireVector, decode_embeddings
from engine.core.interfaces.backend import Embeddings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def text_body(api: TokenApi, model: str, text: str, special: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, api.text: text}
    if api.special is not None:
        body[api.special] = special
    return body


def read_ids(body: bytes) -> tuple[int, ...]:
    return tuple(_read(body, "tokens", list[int]))


def read_text(body: bytes, field: str) -> str:
    return str(_read(body, field, str))


def read_vectors(body: bytes, num_inputs: int) -> Embeddings:
    """One row of unit length for each input, in the inputs' order."""
    import numpy as np  # which nothing else here needs

    try:
        answer = decode_embeddings(body)
        order = sorted(
            answer.data, key=lambda each: 0 if each.index is None else each.index
        )  # a server that tells no index keeps the order
        rows = np.stack([_row(each) for each in order]) if order else np.zeros((0, 0), np.float32)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise unavailable("it sent vectors that can't be understood") from None
    if len(rows) != num_inputs or not np.isfinite(rows).all():
        raise unavailable("it sent other vectors than it was asked for")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    usage = answer.usage
    return Embeddings(unit, 0 if usage is None else usage.prompt_tokens or 0)


def _row(vector: WireVector) -> "NDArray[np.float32]":
    import numpy as np

    if isinstance(vector.embedding, str):
        raw = base64.b64decode(vector.embedding, validate=True)
        return np.frombuffer(raw, "<f4").astype(np.float32)
    return np.asarray(vector.embedding, np.float32)


def _read(body: bytes, field: str, kind: Any) -> Any:
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(found[field], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise unavailable("it sent tokens that can't be understood") from None
