"""All of a model that a server parses, read once: headers, configuration, tokenizer, template."""

from pathlib import Path

from engine.backends.custom.text import parse_text
from engine.backends.custom.weights.model import open_model


def examine_model(path: Path) -> None:
    """Raises what is wrong with it."""
    source = open_model(path)
    try:
        parse_text(source)
    finally:
        source.close()
