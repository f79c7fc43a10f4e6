"""Token ids as 32-bit numbers side by side, so that prefixes are compared and hashed as memory."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # before Python 3.12 it takes no parameter


def packed(token_ids: Iterable[int] = ()) -> Tokens:
    """Raises OverflowError for what is no 32-bit number."""
    return array("i", token_ids)
