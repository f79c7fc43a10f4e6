"""The HTTP server.

Most of FastAPI's import is spent on validators for its OpenAPI document; they are built when that
document is asked for, so that a server starts sooner.
"""

import pydantic

_config = pydantic.BaseModel.model_config
pydantic.BaseModel.model_config = pydantic.ConfigDict(defer_build=True)
try:
    import fastapi as _  # noqa: F401
finally:
    pydantic.BaseModel.model_config = _config
