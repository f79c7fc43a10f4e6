"""Checks that a prompt and its answer fit the context of a model."""

from engine.core.errors import ContextLengthError


def check_context(num_prompt: int, max_tokens: int | None, max_seq_len: int, param: str) -> None:
    """Check that prompt and max_tokens fit the context. Some clients recognize this error by its
    first sentence.
    """
    asked = max_tokens or 0
    if num_prompt + asked > max_seq_len or num_prompt >= max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_seq_len} tokens. However, you requested "
            f"{num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} in the completion). "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            num_prompt_tokens=num_prompt,
            max_tokens=max_seq_len,
        )


def check_input(num_tokens: int, max_seq_len: int, name: str) -> None:
    """Check that an embedding input fits the context. The input may fill the whole context, because
    no output token is generated. `name` is its name in the request.
    """
    if num_tokens > max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_seq_len} tokens. However, {name} has "
            f"{num_tokens} tokens. Shorten it, or set truncate_prompt_tokens.",
            param=name,
            num_prompt_tokens=num_tokens,
            max_tokens=max_seq_len,
        )
