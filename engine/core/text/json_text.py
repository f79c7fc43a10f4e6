"""Checks JSON for lone surrogates, which an escape in JSON can express but UTF-8 can't encode."""

import json
import re
from typing import Any

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def check_characters(text: str, value: Any) -> None:
    """Raise `ValueError` if `value`, which was parsed from `text`, contains a lone surrogate."""
    if _ESCAPED.search(text):
        json.dumps(value, ensure_ascii=False).encode()
