"""The table `[presets.ID]` of the TOML file: the defaults of a model. Also the base class of all
named tables.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from engine.core.interfaces.sampling_fields import SamplingFields


class ConfigTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):  # in Python, a bool is also an int
        raise ValueError(f"must not be {str(value).lower()}")
    return value


NO_BOOL = BeforeValidator(_refuse_bool)


class ParametersTable(SamplingFields):
    """A table `[presets.ID.parameters]`: sampling parameters for requests that do not set them."""

    model_config = ConfigDict(allow_inf_nan=False)

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the sampling."""

    _no_bool = field_validator("*", mode="before")(_refuse_bool)


class PresetTable(ConfigTable):
    """A table `[presets.ID]`: defaults of the model that clients call ID."""

    model: str | None = Field(default=None, min_length=1, max_length=4096)
    """What to load for ID: a name, a path or an address. Unset, ID itself."""
    system: str | None = Field(default=None, min_length=1, max_length=10**6)
    """System message of conversations that have none."""
    template: str | None = Field(default=None, min_length=1, max_length=10**6)
    """Chat template in place of the model's own: Jinja text, a file with it, or a built-in name."""
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
