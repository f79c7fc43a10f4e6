"""The sampling parameters that requests and presets may set, with their bounds.

A missing field, or null, leaves the parameter to the preset, and then to the default of
`SamplingParams`. The sentence below a field is its line in docs/reference/settings.md.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 2**24
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
UpTo10 = Annotated[float, Field(ge=0, le=10)]
UpTo100 = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
LastTokens = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]  # -1: all tokens


class SamplingFields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Max tokens of an answer; not for `/v1/completions`, which has a default of its own."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: Fraction | None = None
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """Sample from this many of the likeliest tokens; 0 turns it off."""
    min_p: Fraction | None = None
    """Min probability of a token, relative to the likeliest one."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Divides the logits of tokens that occurred before."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: Penalty | None = None
    """The same, once per occurrence."""
    repeat_last_n: LastTokens | None = None
    """How many last tokens the penalties look at; -1 means all."""
    typical_p: Fraction | None = None
    """Locally typical sampling; 1 turns it off."""
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] | None = None
    """Max distance of a logit from the largest one, in standard deviations; 0 turns it off."""
    xtc_probability: Fraction | None = None
    """Probability with which XTC drops the likeliest tokens."""
    xtc_threshold: Fraction | None = None
    """Min probability of the tokens that XTC drops."""
    dry_multiplier: UpTo100 | None = None
    """Strength of DRY's penalty for repetitions; 0 turns it off."""
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    """Growth of DRY's penalty with each repeated token."""
    dry_allowed_length: Count | None = None
    """Length of a repetition from which DRY penalizes it."""
    dry_penalty_last_n: LastTokens | None = None
    """How many last tokens DRY looks at; -1 means all."""
    min_keep: Count | None = None
    """Min number of tokens that top-p, min-p, typical-p and XTC each keep."""
    dynatemp_range: UpTo10 | None = None
    """How far the temperature may differ from `temperature`, by the entropy."""
    dynatemp_exponent: UpTo100 | None = None
    """Exponent of the entropy for `dynatemp_range`."""
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    """Version of Mirostat; 0 turns it off."""
    mirostat_tau: UpTo100 | None = None
    """Mirostat's target surprise in bits."""
    mirostat_eta: UpTo10 | None = None
    """Mirostat's learning rate."""
