"""The HTTP server.

Importing FastAPI spends most of its time on building pydantic validators for the OpenAPI document.
This module makes pydantic build them later, when the document is first requested. So the server
starts sooner.
"""

import pydantic

_config = pydantic.BaseModel.model_config
pydantic.BaseModel.model_config = pydantic.ConfigDict(defer_build=True)
try:
    import fastapi as _  # noqa: F401
finally:
    pydantic.BaseModel.model_config = _config
