"""The HTTP server.

Most of the time for importing FastAPI is spent on validators for its OpenAPI document. Here they
are built when that document is first requested, so that the server starts sooner.
"""

import pydantic

_config = pydantic.BaseModel.model_config
pydantic.BaseModel.model_config = pydantic.ConfigDict(defer_build=True)
try:
    import fastapi as _  # noqa: F401
finally:
    pydantic.BaseModel.model_config = _config
