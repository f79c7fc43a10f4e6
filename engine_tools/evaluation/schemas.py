"""Checks answers that must be JSON, with the package jsonschema of the extra `eval`."""

import json
import re
from typing import Any

from engine.core.errors import ConfigError

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)


def schema_fault(schema: Any) -> str | None:
    """Why a value is not a JSON schema. None if it is one."""
    validators, exceptions = _package()
    try:
        validators.validator_for(schema).check_schema(schema)
    except exceptions.SchemaError as error:
        return str(error.message)
    return None


def json_in(text: str) -> Any:
    """The JSON value of an answer, which may stand in a code fence. Raises `ValueError` without."""
    fenced = _FENCE.search(text)
    return json.loads(fenced.group(1) if fenced else text)


def satisfies(value: Any, schema: Any) -> bool:
    validators, _ = _package()
    return bool(validators.validator_for(schema)(schema).is_valid(value))


def _package() -> tuple[Any, Any]:
    try:
        from jsonschema import exceptions, validators  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "a question with a schema needs a package: pip install 'engine[eval]'"
        ) from None
    return validators, exceptions
