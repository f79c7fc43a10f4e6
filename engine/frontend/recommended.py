"""The sampling parameters that a model's files recommend: `generation_config.json` of a folder, and
the keys `general.sampling.*` of a GGUF file.

`engine run`, `engine chat` and the web page use them. A request to the API does not; its defaults
are those of the API.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.core.interfaces.sampling_fields import SamplingFields
from engine.core.text.json_text import read_json

log = logging.getLogger(__name__)
CONFIG_NAME = "generation_config.json"
GGUF_PREFIX = "general.sampling."
# Our parameters whose keys in a GGUF file have other names; `generation_config.json` has ours. The
# order of samplers is not read: it is the same for all models.
_GGUF_NAMES = {
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
}
_NAMES = tuple(name for name in SamplingFields.model_fields if name != "max_tokens")


def of_folder(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` recommends. Greedy, if it says not to sample."""
    given = read_json(folder / CONFIG_NAME) or {}
    found = {name: given[name] for name in _NAMES if given.get(name) is not None}
    if given.get("do_sample") is False:
        found = {name: found[name] for name in ("repetition_penalty",) if name in found}
        found["temperature"] = 0.0
    return _valid(found, CONFIG_NAME)


def of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: GGUF_PREFIX + _GGUF_NAMES.get(name, name) for name in _NAMES}
    found = {name: metadata[key] for name, key in keys.items() if key in metadata}
    return _valid(found, GGUF_PREFIX + "*")


def _valid(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without values that a request may not have. They are no reason to refuse the model."""
    kept = {}
    for name, value in found.items():
        try:
            read = SamplingFields.model_validate({name: value})
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            log.warning("%s: %s %r is not used: %s", where, name, value, reason)
        else:
            kept[name] = getattr(read, name)
    return kept
