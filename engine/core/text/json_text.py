"""Reads the text and JSON files of a model directory.

JSON is also checked for lone surrogates. An escape in JSON can express them, but UTF-8 can't encode
them.
"""

import json
import re
from pathlib import Path
from typing import Any

from engine.core.errors import ModelFormatError

_MAX_BYTES = 256 << 20
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def check_characters(text: str, value: Any) -> None:
    """Raise `ValueError` if `value`, which was parsed from `text`, contains a lone surrogate."""
    if _ESCAPED.search(text):
        json.dumps(value, ensure_ascii=False).encode()


def read_text(path: Path) -> str:
    if path.stat().st_size > _MAX_BYTES:
        raise ModelFormatError(f"{path} is larger than {_MAX_BYTES >> 20} MiB.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not valid UTF-8: {error}.") from error


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    text = read_text(path)
    try:
        value = json.loads(text)
        check_characters(text, value)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} does not hold a JSON object.")
    return value
