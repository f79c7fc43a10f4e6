"""Compile limits of grammars.

The child that test-compiles a grammar and the engine that uses it have the same limits, so a
grammar that passes the check also compiles in the engine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 50_000  # max lexer states; each takes 1 to 2 KiB
MAX_GRAMMAR_SIZE = 200_000  # max number of symbols in a grammar


def parser_limits() -> "LLParserLimits":
    """llguidance's default limits, but fewer lexer states and smaller grammars."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
