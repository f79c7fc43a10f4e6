"""What a request read inside the model. The engine makes it as the bytes of a safetensors file."""

import base64
import json
from array import array
from collections.abc import Iterator
from math import prod
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.tensor_file import StoredTensor, unpack_tensors


class Result:
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

    def rows(self, site: str, wanted: Any) -> tuple[list[int], list[bytes]]:
        """The captured positions of a site, and the values of each. `wanted` are positions, "all"
        or "last".
        """
        for name, places, tensor in self.captures:
            if name != site:
                continue
            if wanted == "last":
                wanted = [-1]
            if wanted == "all":
                wanted = places
            num_prompt = self.facts["num_prompt"]
            chosen = [each + num_prompt if each < 0 else each for each in wanted]
            missing = [each for each in chosen if each not in places]
            if missing:
                break
            size = 4 * prod(tensor.shape[1:])
            starts = [size * places.index(each) for each in chosen]
            return chosen, [tensor.data[start : start + size] for start in starts]
        raise InvalidRequestError(
            f"interp: the result has no values of {site} at these positions.", param="interp"
        )

    def body(self, encoding: str) -> dict[str, Any]:
        """The result as JSON, with all values. `encoding` is "float" or "base64"."""
        made: dict[str, Any] = {
            "num_prompt": self.facts["num_prompt"],
            "token_ids": self.facts["token_ids"],
            "captures": [
                {"site": site, "positions": places} | _values(tensor, encoding)
                for site, places, tensor in self.captures
            ],
        }
        for name in ("lens", "attribution"):
            if name in self.facts:
                made[name] = self.facts[name]
        if "attention" in self.facts:
            made["attention"] = [
                {"site": each["site"], "positions": each["positions"]}
                | _values(self.tensors[each["tensor"]], encoding)
                for each in self.facts["attention"]
            ]
        return made

    def summary(self) -> dict[str, Any]:
        """As `body`, but with the shapes of tensors instead of their values."""
        return self.body("none")


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
