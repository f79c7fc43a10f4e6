"""The table `[presets.ID]` of the TOML file: the defaults of a model. Also the base class of all
named tables.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):  # in Python, a bool is also an int
        raise ValueError(f"must not be {str(value).lower()}")
    return value


NO_BOOL = BeforeValidator(_refuse_bool)
Fraction = Annotated[float, Field(ge=0, le=1), NO_BOOL] | None
Penalty = Annotated[float, Field(ge=-2, le=2), NO_BOOL] | None
UpTo10 = Annotated[float, Field(ge=0, le=10), NO_BOOL] | None
UpTo100 = Annotated[float, Field(ge=0, le=100), NO_BOOL] | None
Count = Annotated[int, Field(ge=0, le=2**24), NO_BOOL] | None
LastTokens = Annotated[int, Field(ge=-1, le=2**24), NO_BOOL] | None


class ParametersTable(Table):
    """A table `[presets.ID.parameters]`: sampling parameters for requests that do not set them."""

    temperature: Annotated[float, Field(ge=0, le=2), NO_BOOL] | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: Fraction = None
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=0, le=2**31), NO_BOOL] | None = None
    """Sample from this many of the likeliest tokens; 0 turns it off."""
    min_p: Fraction = None
    """Min probability of a token, relative to the likeliest one."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10), NO_BOOL] | None = None
    """Divides the logits of tokens that occurred before."""
    presence_penalty: Penalty = None
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: Penalty = None
    """The same, once per occurrence."""
    repeat_last_n: LastTokens = None
    """How many last tokens the penalties look at; -1 means all."""
    typical_p: Fraction = None
    """Locally typical sampling; 1 turns it off."""
    top_n_sigma: Annotated[float, Field(ge=-1, le=100), NO_BOOL] | None = None
    """Max distance of a logit from the largest one, in standard deviations; 0 turns it off."""
    xtc_probability: Fraction = None
    """Probability with which XTC drops the likeliest tokens."""
    xtc_threshold: Fraction = None
    """Min probability of the tokens that XTC drops."""
    dry_multiplier: UpTo100 = None
    """Strength of DRY's penalty for repetitions; 0 turns it off."""
    dry_base: Annotated[float, Field(ge=1, le=100), NO_BOOL] | None = None
    """Growth of DRY's penalty with each repeated token."""
    dry_allowed_length: Count = None
    """Length of a repetition from which DRY penalizes it."""
    dry_penalty_last_n: LastTokens = None
    """How many last tokens DRY looks at; -1 means all."""
    min_keep: Count = None
    """Min number of tokens that top-p, min-p, typical-p and XTC each keep."""
    dynatemp_range: UpTo10 = None
    """How far the temperature may differ from `temperature`, by the entropy."""
    dynatemp_exponent: UpTo100 = None
    """Exponent of the entropy for `dynatemp_range`."""
    mirostat: Annotated[int, Field(ge=0, le=2), NO_BOOL] | None = None
    """Version of Mirostat; 0 turns it off."""
    mirostat_tau: UpTo100 = None
    """Mirostat's target surprise in bits."""
    mirostat_eta: UpTo10 = None
    """Mirostat's learning rate."""
    seed: Annotated[int, Field(ge=0, lt=2**63), NO_BOOL] | None = None
    """Seed of the sampling."""
    max_tokens: Annotated[int, Field(ge=1, le=2**24), NO_BOOL] | None = None
    """Max tokens of an answer; not for `/v1/completions`, which has a default of its own."""


class PresetTable(Table):
    """A table `[presets.ID]`: defaults of the model that clients call ID."""

    model: str | None = Field(default=None, min_length=1, max_length=4096)
    """What to load for ID: a name, a path or an address. Unset, ID itself."""
    system: str | None = Field(default=None, min_length=1, max_length=10**6)
    """System message of conversations that have none."""
    template: str | None = Field(default=None, min_length=1, max_length=10**6)
    """Chat template in place of the model's own: Jinja text, or the path of a file with it."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        default=(), max_length=16
    )
    """Stop strings of requests that have none."""
    template_options: dict[Annotated[str, Field(max_length=64)], bool | int | float | str] = Field(
        default_factory=dict, max_length=32
    )
    """Options of the chat template for requests that do not set them in `chat_template_kwargs`."""
    parameters: ParametersTable | None = None
    """Sampling parameters of requests that do not set them: a table of its own."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that are set, with the stop strings."""
        parameters = self.parameters
        set_here = {} if parameters is None else parameters.model_dump(exclude_none=True)
        return set_here | ({"stop": self.stop} if self.stop else {})
