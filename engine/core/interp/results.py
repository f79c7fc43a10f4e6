"""What a request read inside the model. The engine makes it as the bytes of a safetensors file."""

import base64
import json
from array import array
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.tensor_file import StoredTensor, unpack_tensors


class InterpResult:
    """The result of one request. `data` is a safetensors file with all tensors; its metadata
    `interp` is a JSON text with everything else.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        tensors, metadata = unpack_tensors(data)
        self.tensors = {each.name: each for each in tensors}
        self.facts: dict[str, Any] = json.loads(metadata["interp"])

    @property
    def captures(self) -> Iterator[tuple[str, list[int], StoredTensor]]:
        """The site, the positions and the values (P, ...) of each capture."""
        for entry in self.facts["captures"]:
            yield entry["site"], entry["positions"], self.tensors[entry["tensor"]]

    def rows(
        self, site: str, wanted: Any, count: Callable[[int], None] = lambda num_bytes: None
    ) -> tuple[list[int], list[bytes]]:
        """The captured positions of a site, and the values of each. `wanted` are positions, "all"
        or "last". `count` is called with the bytes of the values before they are copied.
        """
        num_prompt = self.facts["num_prompt"]
        for name, places, tensor in self.captures:
            if name != site:
                continue
            asked = places if wanted == "all" else [-1] if wanted == "last" else wanted
            chosen = [each + num_prompt if each < 0 else each for each in asked]
            index = {place: number for number, place in enumerate(places)}
            if not all(each in index for each in chosen):
                continue  # a later capture of the site may have them
            size = 4 * prod(tensor.shape[1:])
            count(size * len(chosen))
            starts = [size * index[each] for each in chosen]
            return chosen, [bytes(tensor.data[start : start + size]) for start in starts]
        raise InvalidRequestError(
            f"interp: the result has no values of {site} at these positions.", param="interp"
        )

    @property
    def lens(self) -> list[dict[str, Any]]:
        """For each layer and position: the ids and log-probabilities of the likeliest tokens."""
        told = self.facts.get("lens")
        if told is None:
            return []
        tokens, logprobs = self.tensors["lens.tokens"], self.tensors["lens.logprobs"]
        top = tokens.shape[2]
        ids, scores = array("i", bytes(tokens.data)), array("f", bytes(logprobs.data))
        places = [(layer, place) for layer in told["layers"] for place in told["positions"]]
        return [
            {
                "layer": layer,
                "position": place,
                "top": list(
                    zip(ids[start : start + top], scores[start : start + top], strict=True)
                ),
            }
            for start, (layer, place) in zip(range(0, top * len(places), top), places, strict=True)
        ]

    def body(self, encoding: str) -> dict[str, Any]:
        """The result as JSON, with all values. `encoding` is "float", "base64" or "none". With
        "none", it has the shapes of tensors instead of their values.
        """
        made: dict[str, Any] = {
            "num_prompt": self.facts["num_prompt"],
            "token_ids": self.facts["token_ids"],
            "captures": [
                {"site": site, "positions": places} | _values(tensor, encoding)
                for site, places, tensor in self.captures
            ],
        }
        if "attribution" in self.facts:
            made["attribution"] = self.facts["attribution"]
        if "lens" in self.facts:
            shape = self.tensors["lens.tokens"].shape
            made["lens"] = (
                self.facts["lens"] | {"shape": shape} if encoding == "none" else self.lens
            )
        if "attention" in self.facts:
            made["attention"] = [
                {"site": each["site"], "positions": each["positions"]}
                | _values(self.tensors[each["tensor"]], encoding)
                for each in self.facts["attention"]
            ]
        return made


def _values(tensor: StoredTensor, encoding: str) -> dict[str, Any]:
    shape = {"shape": list(tensor.shape)}
    if encoding == "none":
        return shape
    if encoding == "base64":
        return shape | {"values": base64.b64encode(tensor.data).decode()}
    values = array("f")
    values.frombytes(tensor.data)
    return shape | {"values": _nested(values.tolist(), tensor.shape)}


def _nested(flat: list[float], shape: tuple[int, ...]) -> list[Any]:
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]  # type: ignore[misc]
    return flat
