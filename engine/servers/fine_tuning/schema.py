"""The request bodies of /v1/fine_tuning/jobs, and jobs and events as stored and as sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from engine.finetuning.data import Method
from engine.finetuning.plan import MAX_RANK, SUFFIX, Decided, Hyperparameters, LoraShape
from engine.servers.http.errors import problem
from engine.servers.http.listing import Cursor, Query
from engine.servers.schema.fields import Metadata

Status = Literal[
    "validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"
]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED = ("succeeded", "failed", "cancelled")
Auto = Literal["auto"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


def _or_auto(rule: str) -> WrapValidator:
    """One error for a value that is neither `rule` nor auto. Pydantic would have two."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("auto", f"should be auto, or {rule}") from None

    return WrapValidator(check)


class HyperparametersBody(_Body):
    n_epochs: Annotated[
        Auto | Annotated[int, Field(ge=1, le=1000)], _or_auto("an integer from 1 to 1000")
    ] = "auto"
    batch_size: Annotated[
        Auto | Annotated[int, Field(ge=1, le=1024)], _or_auto("an integer from 1 to 1024")
    ] = "auto"
    learning_rate_multiplier: Annotated[
        Auto | Annotated[float, Field(ge=1e-4, le=100)], _or_auto("a number from 0.0001 to 100")
    ] = "auto"
    beta: Annotated[
        Auto | Annotated[float, Field(ge=1e-4, le=10)], _or_auto("a number from 0.0001 to 10")
    ] = "auto"

    def stated(self) -> Hyperparameters:
        return Hyperparameters(**self.model_dump())


class MethodSettings(_Body):
    hyperparameters: HyperparametersBody = HyperparametersBody()


class MethodBody(_Body):
    type: Method
    supervised: MethodSettings | None = None
    dpo: MethodSettings | None = None


class LoraBody(_Body):
    """An extension of OpenAI's body: the shape of the adapter."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 16
    alpha: Annotated[float, Field(gt=0, le=4096)] | None = None  # None: twice the rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=64)
    ] = []

    def shape(self) -> LoraShape:
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return LoraShape(
            rank=self.rank,
            alpha=alpha,
            dropout=self.dropout,
            target_modules=tuple(self.target_modules),
        )


FileId = Annotated[str, Field(min_length=1, max_length=64)]


class JobBody(_Body):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    training_file: FileId
    validation_file: FileId | None = None
    method: MethodBody | None = None
    hyperparameters: HyperparametersBody | None = None  # OpenAI's older place for them
    suffix: Annotated[str, Field(pattern=SUFFIX)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    integrations: list[Any] | None = None
    lora: LoraBody = LoraBody()

    @field_validator("integrations")
    @classmethod
    def _has_none(cls, value: list[Any] | None) -> None:
        if value:
            raise problem(
                "integrations",
                "there are none here, also not wandb; the figures of each step are in the job's "
                "events and in its result file",
            )

    @property
    def kind(self) -> Method:
        return "supervised" if self.method is None else self.method.type

    def stated(self) -> Hyperparameters:
        """The hyperparameters of the method, or those of the older field."""
        settings = None if self.method is None else getattr(self.method, self.method.type)
        if settings is not None:
            return settings.hyperparameters.stated()
        return (self.hyperparameters or HyperparametersBody()).stated()


class JobQuery(Query):
    after: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class JobListQuery(JobQuery):
    metadata: Metadata = {}  # metadata[KEY]=VALUE: jobs that have this pair


class EventQuery(JobQuery):
    stream: bool = False  # our extension: server-sent events until the job ends


@dataclass(frozen=True, slots=True)
class Job:
    """A job. The columns of its table have the same names. Times are in seconds since 1970."""

    id: str
    owner: str
    key: str  # name of the API key that made the job
    model: str
    suffix: str
    status: Status
    method: Method
    hyperparameters: str  # `Decided`, as JSON
    seed: int
    training_file: str
    validation_file: str | None
    metadata: str | None
    created_at: int
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    error: str | None = None
    result_file: str | None = None  # id of step_metrics.csv

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def labels(self) -> dict[str, str]:
        """The metadata. Empty if there are none."""
        return {} if self.metadata is None else msgspec.json.decode(self.metadata)

    def body(self, estimated_finish: int | None = None) -> dict[str, Any]:
        decided = msgspec.json.decode(self.hyperparameters, type=Decided)
        numbers = {
            "n_epochs": decided.n_epochs,
            "batch_size": decided.batch_size,
            "learning_rate_multiplier": decided.learning_rate_multiplier,
        }
        by_method = numbers | ({"beta": decided.beta} if self.method == "dpo" else {})
        error = None
        if self.error is not None:
            error = {"code": "training_failed", "message": self.error, "param": None}
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": self.created_at,
            "finished_at": self.finished_at,
            "model": self.model,
            "fine_tuned_model": self.fine_tuned_model,
            "organization_id": "",
            "status": self.status,
            "method": {"type": self.method, self.method: {"hyperparameters": by_method}},
            "hyperparameters": numbers,
            "seed": self.seed,
            "training_file": self.training_file,
            "validation_file": self.validation_file,
            "result_files": [] if self.result_file is None else [self.result_file],
            "trained_tokens": self.trained_tokens,
            "error": error,
            "integrations": [],
            "metadata": None if self.metadata is None else self.labels,
            "estimated_finish": estimated_finish,
        }


@dataclass(frozen=True, slots=True)
class JobEvent:
    seq: int
    job_id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    kind: Literal["message", "metrics"]
    message: str
    data: str  # JSON

    def body(self) -> dict[str, Any]:
        return {
            "id": f"ftevent-{self.seq}",
            "object": "fine_tuning.job.event",
            "created_at": self.created_at,
            "level": self.level,
            "type": self.kind,
            "message": self.message,
            "data": msgspec.json.decode(self.data),
        }
