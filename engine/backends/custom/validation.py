"""Checks the files of a model before they are used. For this, it parses the headers, the config,
the tokenizer and the chat template.
"""

from collections.abc import Callable
from pathlib import Path

from engine.weights.model import open_model


def validate_model(path: Path, passed: Callable[[], None]) -> bytes:
    """Check a model. Raises if the model is invalid. Returns the parsed tokenizer and template
    data, encoded so that they can be cached, or empty bytes if they cannot be cached.

    Calls `passed` before the tokenizer and the template are parsed, because an engine process reads
    neither of them when it loads a model.
    """
    source = open_model(path)
    passed()
    # Imported late: an engine process that waits for `passed` waits less long.
    import msgspec

    from engine.frontend.text_model import parse_text

    try:
        _, facts = parse_text(source)
        is_kept = facts is not None and len(source.checkpoint.files) == 1
        return msgspec.msgpack.encode(facts) if is_kept else b""
    finally:
        source.close()
