"""All of a model that a server parses, read once: headers, configuration, tokenizer, template."""

from pathlib import Path

import msgspec

from engine.backends.custom.frontend.text_model import parse_text
from engine.backends.custom.weights.model import open_model


def examine_model(path: Path) -> bytes:
    """What is kept of a model's text, if anything. Raises what is wrong with it."""
    source = open_model(path)
    try:
        _, facts = parse_text(source)
        is_kept = facts is not None and len(source.checkpoint.files) == 1
        return msgspec.msgpack.encode(facts) if is_kept else b""
    finally:
        source.close()
