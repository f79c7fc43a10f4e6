"""The `interp` object of a request: its fields and bounds. Types are strict, and NaN is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.interp import Phase, Span

MAX_CAPTURES = 4096
MAX_EDITS = 256
MAX_POSITIONS = 65_536
MAX_VECTOR = 2**20
MAX_TOP = 100
# Of a whole request
MAX_ALL_POSITIONS = 2**16
MAX_ALL_NUMBERS = 2**20

Index = Annotated[int, Field(ge=-(2**24), le=2**24)]
Number = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w][\w.:/-]*$")]
SiteName = Annotated[str, Field(min_length=1, max_length=128)]
Numbered = Annotated[int, Field(ge=0, le=1024)]
Layers = Annotated[list[Numbered], Field(min_length=1, max_length=1025)]
Positions = Literal["all", "last"] | Annotated[list[Index], Field(max_length=MAX_POSITIONS)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class _Placed(_Part):
    """`last` is the last position of the prompt. Negative positions count from the prompt's end."""

    positions: Positions = "all"
    phase: Phase = "both"

    @property
    def span(self) -> Span:
        if self.positions == "all":
            return Span(None, self.phase)
        places = (-1,) if self.positions == "last" else tuple(dict.fromkeys(self.positions))
        return Span(places, self.phase)


class CaptureSpec(_Placed):
    site: SiteName


class Source(_Part):
    """Captured values of an earlier request."""

    id: Name
    site: SiteName | None = None  # the site of the edit, if not given
    positions: Positions = "all"  # positions of the earlier request


class EditSpec(_Placed):
    site: SiteName
    op: Literal["add", "scale", "set", "project_out", "ablate", "patch", "clamp"]
    # Numbers, or the name of a vector of this server
    vector: Annotated[list[Number], Field(max_length=MAX_VECTOR)] | Name | None = None
    scale: Number = 1.0
    source: Source | None = Field(default=None, alias="from")
    sae: Name | None = None  # a sparse autoencoder of this server
    feature: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "EditSpec":
        by_feature = self.sae is not None or self.feature is not None
        if by_feature and (self.sae is None or self.feature is None):
            raise ValueError("sae and feature belong together")
        if self.op == "clamp" and not by_feature:
            raise ValueError("op clamp needs sae and feature")
        if by_feature and self.op not in ("add", "clamp", "project_out"):
            raise ValueError(f"op {self.op} takes no feature")
        if self.op == "patch" and (self.source is None or self.vector is not None):
            raise ValueError('op patch needs "from", and takes no vector')
        if self.op != "patch" and self.source is not None:
            raise ValueError(f'op {self.op} takes no "from"')
        needs = self.op in ("add", "set", "project_out") and not by_feature
        if needs and self.vector is None:
            raise ValueError(f"op {self.op} needs a vector")
        if self.op in ("scale", "clamp") and self.vector is not None:
            raise ValueError(f"op {self.op} takes no vector")
        return self


class LensSpec(_Placed):
    positions: Positions = "last"
    layers: Layers | Literal["all"] = "all"
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5
    tuned: Name | None = None  # a tuned lens of this server


class AttentionSpec(_Placed):
    positions: Positions = "last"
    layers: Layers
    heads: Layers | None = None


class FeaturesSpec(_Placed):
    """The largest features of a sparse autoencoder."""

    positions: Positions = "last"
    sae: Name
    site: SiteName | None = None  # if not given, the site that the autoencoder was made for
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 10


class AttributionSpec(_Part):
    target: (
        Annotated[int, Field(ge=0, le=2**31 - 1)] | Annotated[str, Field(max_length=256)] | None
    ) = None
    position: Index = -1
    method: Literal["direct", "input_x_gradient"] = "direct"


class InterpSpec(_Part):
    """What a client wants to read and to change inside the model."""

    capture: Annotated[list[CaptureSpec], Field(max_length=MAX_CAPTURES)] = []
    edit: Annotated[list[EditSpec], Field(max_length=MAX_EDITS)] = []
    lens: LensSpec | None = None
    attention: AttentionSpec | None = None
    features: FeaturesSpec | None = None
    attribution: AttributionSpec | None = None
    store: bool = False  # keep the results by id, even if they are small
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def reads(self) -> bool:
        asked = (self.lens, self.attention, self.features, self.attribution)
        return bool(self.capture) or any(each is not None for each in asked)


def parse_interp(raw: Any) -> InterpSpec:
    """Raises `InvalidRequestError` with the path of the first wrong field."""
    if isinstance(raw, dict):
        _check_lengths(raw)
    try:
        return InterpSpec.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"interp{path}: {message}.", param=f"interp{path}") from None


def _check_lengths(raw: dict[str, Any]) -> None:
    """Bound all lists of a request together, before they are validated one by one."""
    given: list[Any] = [raw, *(raw.get(name) for name in ("lens", "attention", "features"))]
    for name in ("capture", "edit"):
        given += raw[name] if isinstance(raw.get(name), list) else []
    parts: list[dict[str, Any]] = [part for part in given if isinstance(part, dict)]
    parts += [part["from"] for part in parts if isinstance(part.get("from"), dict)]
    limits = {"positions": MAX_ALL_POSITIONS, "vector": MAX_ALL_NUMBERS}
    for field, most in limits.items():
        lists = [part[field] for part in parts if isinstance(part.get(field), list)]
        total = sum(map(len, lists))
        if total > most:
            raise InvalidRequestError(
                f"interp: all `{field}` have {total:,} numbers together, and may have {most:,}.",
                param="interp",
            )
