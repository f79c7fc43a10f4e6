"""Text and token ids: tokenizers, chat templates, the detokenizer."""
