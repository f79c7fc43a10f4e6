"""Features of sparse autoencoders. It needs numpy, so it is imported only when it is used."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InvalidRequestError
from engine.core.interp.resolving import sae_site
from engine.core.interp.results import Result
from engine.core.interp.spec import FeaturesSpec
from engine.core.interp.vectors import VectorStore, floats
from engine.core.tensor_file import StoredTensor

F32 = NDArray[np.float32]


def matrix(tensor: StoredTensor) -> F32:
    return np.frombuffer(floats(tensor), np.float32).reshape(tensor.shape)


def encode(tensors: dict[str, StoredTensor], x: F32) -> F32:
    """(P, D) -> (P, F) The features of rows of activations: relu or, with a threshold, JumpReLU."""
    weight = matrix(tensors["W_enc"])
    if x.shape[1] != weight.shape[0]:
        raise InvalidRequestError(
            f"interp.features: the autoencoder reads {weight.shape[0]} values, and the site has"
            f" {x.shape[1]}.",
            param="interp.features",
        )
    if "b_dec" in tensors:
        x = x - matrix(tensors["b_dec"])
    before = x @ weight
    if "b_enc" in tensors:
        before = before + matrix(tensors["b_enc"])
    threshold = matrix(tensors["threshold"]) if "threshold" in tensors else np.float32(0)
    features: F32 = np.where(before > threshold, np.maximum(before, 0), 0).astype(np.float32)
    return features


def top_features(spec: FeaturesSpec, store: VectorStore, result: Result) -> list[dict[str, Any]]:
    """The largest features at each position."""
    tensors, _ = store.load(spec.sae)
    if "W_enc" not in tensors:
        raise InvalidRequestError(
            f"interp.features: '{spec.sae}' is no sparse autoencoder.", param="interp.features"
        )
    site = spec.site or sae_site(store, spec.sae)
    places, rows = result.rows(site, "all" if spec.positions == "all" else spec.positions)
    values = np.stack([np.frombuffer(each, np.float32) for each in rows])
    found = []
    for place, row in zip(places, encode(tensors, values), strict=True):
        best = np.argsort(-row, kind="stable")[: spec.top]
        top = [{"feature": int(i), "value": float(row[i])} for i in best if row[i] > 0]
        found.append({"position": place, "active": int((row > 0).sum()), "top": top})
    return found
