"""Everything that a server does with a model file, on a small scale."""

import contextlib
from pathlib import Path

from engine.core.errors import InvalidRequestError
from engine.frontend.text_model import parse_text
from engine.weights.model import open_model

MESSAGES = [{"role": "user", "content": "Hello, is it 3 o'clock? 🙂"}]


def read_model(path: Path) -> None:
    source = open_model(path)
    try:
        text, _ = parse_text(source)
        for weight in source.weights.values():
            assert weight.tensor.raw().size == weight.tensor.nbytes
            assert weight.numpy().shape == weight.spec.shape
        ids = text.encode_prompt(MESSAGES[0]["content"])
        assert all(0 <= each < text.tokenizer.vocab_size for each in ids)
        # A template that can't render this conversation.
        with contextlib.suppress(InvalidRequestError):
            text.chat.template.render(MESSAGES, text.tokenizer.specials)
    finally:
        source.close()
