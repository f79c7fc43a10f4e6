"""What a request must satisfy before it is sent to the engine, with the client's name for each
field.

The engine checks again what would harm others; here the client learns which field to change.
"""

from collections.abc import Iterable

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.request import SamplingParams


def check_prompt(prompt: tuple[int, ...], vocab_size: int, param: str) -> None:
    if not prompt:
        raise InvalidRequestError("The prompt has no tokens.", param=param)
    _check_ids(prompt, vocab_size, param)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise InvalidRequestError(
            f"logprobs must be at most {vocab_size}, the model's tokens.", param="logprobs"
        )


def check_context(num_prompt: int, max_tokens: int | None, max_seq_len: int, param: str) -> None:
    """The prompt and what is asked for must fit the context; clients know the first sentence."""
    asked = max_tokens or 0
    if num_prompt + asked > max_seq_len or num_prompt >= max_seq_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_seq_len} tokens. However, you requested "
            f"{num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} in the completion). "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )


def check_input(num_tokens: int, max_seq_len: int) -> None:
    """Of an input that becomes a vector: nothing is written behind it."""
    if num_tokens > max_seq_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_seq_len} tokens. However, an input has "
            f"{num_tokens} tokens. Shorten it, or set truncate_prompt_tokens.",
            param="input",
            code="context_length_exceeded",
        )


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(
            f"{outside} is not a token id of this model, whose ids are 0 to {vocab_size - 1}.",
            param=param,
        )
