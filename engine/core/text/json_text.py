"""Checks for characters that JSON can express but text can't hold."""

import json
import re
from typing import Any

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def check_characters(text: str, value: Any) -> None:
    """Raise `ValueError` if `value`, parsed from `text`, has a lone surrogate. A lone surrogate
    can't be encoded or be part of a name.
    """
    if _ESCAPED.search(text):
        json.dumps(value, ensure_ascii=False).encode()
