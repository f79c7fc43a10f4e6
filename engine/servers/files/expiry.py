"""Expiry times of stored files and batches. They are wall-clock times in whole seconds since 1970,
because clients see them and they must stay valid after a restart.
"""

import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MIN_LIFE_S = 3_600
MAX_LIFE_S = 30 * 86_400


class ExpiresAfter(BaseModel):
    """How long a client wants to keep a file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)]


def unix_now() -> int:
    return int(time.time())
