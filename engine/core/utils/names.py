"""Suggestions for misspelt names."""

from difflib import get_close_matches


def suggest(name: str, known: list[str]) -> str:
    """The end of an error message about a name: the closest known name, or all of them."""
    nearest = get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(known[:60])}"
