"""Features of sparse autoencoders. It needs numpy, so it is imported only when it is used."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InvalidRequestError
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import FeaturesSpec
from engine.core.interp.vectors import PART_BYTES, VectorStore, checked, floats
from engine.core.tensor_file import FileTensor

F32 = NDArray[np.float32]


def matrix(tensor: FileTensor) -> F32:
    return np.frombuffer(floats(tensor), np.float32).reshape(tensor.shape)


def encode(tensors: dict[str, FileTensor], x: F32) -> F32:
    """(P, D) -> (P, F) The features of rows of activations: relu or, with a threshold, JumpReLU."""
    weight = checked(tensors["W_enc"])
    num_inputs, num_features = weight.shape
    if x.shape[1] != num_inputs:
        raise InvalidRequestError(
            f"interp.features: the autoencoder reads {num_inputs} values, and the site has"
            f" {x.shape[1]}.",
            param="interp.features",
        )
    if "b_dec" in tensors:
        x = x - matrix(tensors["b_dec"])
    before = np.zeros((len(x), num_features), np.float32)
    step = max(1, PART_BYTES // (4 * num_features))
    for first in range(0, num_inputs, step):  # the matrix may be large
        count = min(step, num_inputs - first)
        part = weight.read(4 * first * num_features, 4 * count * num_features)
        rows = np.frombuffer(part, np.float32).reshape(count, num_features)
        before += x[:, first : first + count] @ rows
    if "b_enc" in tensors:
        before = before + matrix(tensors["b_enc"])
    threshold = matrix(tensors["threshold"]) if "threshold" in tensors else np.float32(0)
    features: F32 = np.where(before > threshold, np.maximum(before, 0), 0).astype(np.float32)
    return features


def _encoded(tensors: dict[str, FileTensor], x: F32) -> Iterator[F32]:
    """The features of each row, computed for some rows at a time."""
    step = max(1, PART_BYTES // (4 * tensors["W_enc"].shape[1]))
    for first in range(0, len(x), step):
        yield from encode(tensors, x[first : first + step])


def top_features(
    spec: FeaturesSpec, store: VectorStore, result: InterpResult
) -> list[dict[str, Any]]:
    """The largest features at each position."""
    tensors = store.autoencoder(spec.sae)
    # Its capture is the last one. The request may have captured the site elsewhere too.
    *_, (_, places, tensor) = result.captures
    values = np.frombuffer(tensor.data, np.float32).reshape(len(places), prod(tensor.shape[1:]))
    found = []
    for place, row in zip(places, _encoded(tensors, values), strict=True):
        best = np.argsort(-row, kind="stable")[: spec.top]
        top = [{"feature": int(i), "value": float(row[i])} for i in best if row[i] > 0]
        found.append({"position": place, "active": int((row > 0).sum()), "top": top})
    return found
