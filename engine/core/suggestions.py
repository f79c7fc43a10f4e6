"""Suggestions for misspelt names."""

from difflib import get_close_matches


def suggest(name: str, known: list[str]) -> str:
    """The end of an error message about an unknown name: the closest known name, or up to 60
    names.
    """
    nearest = get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(known[:60])}"
