"""What the Python API returns. The names of classes and fields are those of vLLM."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.core.interfaces.backend import UsageEvent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token. `rank` 1 is the likeliest token. It is None if the token is
    not among the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # by token id: the sampled token and the alternatives


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of an answer. `logprobs` has an entry per token; it is None unless
    log-probabilities were requested. `finish_reason` is None while the choice is incomplete.

    `stop_reason` is the stop string or stop token id that ended the choice. Each tool call has
    OpenAI's form, `{"id", "type", "function": {"name", "arguments": JSON text}}`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None if the prompt was a conversation or token ids.
    `prompt_token_ids` is None if the backend does not report them. `usage` is None until the
    request has finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    usage: UsageEvent | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.outputs[0].text

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that were found in the prefix cache."""
        return None if self.usage is None else self.usage.cached_tokens


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A unit-length vector."""

    vector: "NDArray[np.float32]"

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.vector.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.vector)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The similarity of two texts. For sentence encoders it is a cosine, from -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    request_id: str
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam. `tokens` begin with those of the prompt, and `text` with its text. The end token is
    counted in `cum_logprob` but is not in `tokens`.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best beams after one prompt, best first."""

    sequences: list[BeamSearchSequence]
