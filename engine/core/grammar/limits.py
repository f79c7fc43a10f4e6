"""How much work a grammar may ask for, wherever it is compiled.

The child that tries a grammar out and the engine that later uses it have the same limits, so what
passes the one compiles in the other.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 50_000  # at one to two KiB each
MAX_GRAMMAR_SIZE = 200_000  # symbols


def parser_limits() -> "LLParserLimits":
    """Fuel and items per step are the library's own limits; memory and size are tighter."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
