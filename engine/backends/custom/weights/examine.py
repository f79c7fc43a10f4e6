"""Checks a model's files before they are used: parses the headers, config, tokenizer and chat
template.
"""

from pathlib import Path

import msgspec

from engine.backends.custom.frontend.text_model import parse_text
from engine.backends.custom.weights.model import open_model


def examine_model(path: Path) -> bytes:
    """Check a model. Returns the encoded text facts to cache, or empty bytes if there are none.
    Raises if the model is invalid.
    """
    source = open_model(path)
    try:
        _, facts = parse_text(source)
        is_kept = facts is not None and len(source.checkpoint.files) == 1
        return msgspec.msgpack.encode(facts) if is_kept else b""
    finally:
        source.close()
