"""Names that a user may have misspelt."""

from difflib import get_close_matches


def suggest(name: str, known: list[str]) -> str:
    """The end of a complaint about a name: the nearest one, or all there are."""
    nearest = get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(known[:60])}"
