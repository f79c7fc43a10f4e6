"""What JSON lets through and text can't hold."""

import json
import re
from typing import Any

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def check_characters(text: str, value: Any) -> None:
    """Raise `ValueError` if `value`, which `text` became, has half of a surrogate pair in it: no
    character, which could be neither encoded nor be part of a name.
    """
    if _ESCAPED.search(text):
        json.dumps(value, ensure_ascii=False).encode()
