"""All errors that a user can see. They are subclasses of `EngineError`.

Each class sets its HTTP status and OpenAI error type. The message says what went wrong and what to
change. Any other exception is a bug. Then the client gets status 500 and no details.
"""

import errno
from collections.abc import Mapping
from typing import Any, ClassVar


class EngineError(Exception):
    """Base class of all errors that a user can see. `str(error)` is the message for the user."""

    category: ClassVar[str] = "internal"  # in docs/reference/errors.md
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    # Whether the same request may succeed later. The response tells OpenAI clients whether to
    # retry.
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code
        self.retry_after = retry_after
        self.details = details  # sent with an error in Anthropic's format

    def body(self) -> dict[str, Any]:
        """The response body in OpenAI's error format. It always has these four keys, and `code` is
        always a string.
        """
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.error_code,
            }
        }


class ConfigError(EngineError):
    """A setting is invalid. The message names its key."""

    category = "config"
    code = "config_error"


class ModelError(EngineError):
    """The model is not available: it is missing or still loading, or its engine is down."""

    category = "model"
    status = 503
    code = "model_unavailable"
    retryable = True


class ModelFormatError(ModelError):
    """A model file is invalid. The message names the file, the rule and the place in the file."""

    category = "model_format"
    code = "model_format"
    retryable = False


class InferenceError(EngineError):
    """The computation failed for this request, for example because of non-finite logits."""

    category = "inference"
    code = "inference_error"


class CacheError(EngineError):
    """A command to the prefix cache or to one of its tiers failed."""

    category = "cache"
    status = 503
    code = "cache_error"
    retryable = True


class ResourceError(EngineError):
    """There is not enough memory or disk space. The message says what would fit."""

    category = "resource"
    status = 507
    code = "insufficient_resources"


# EFBIG means that the process may not write files of this size.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def disk_full_error() -> ResourceError:
    return ResourceError("The disk is full, and nothing was stored. Free space there, then retry.")


class InvalidRequestError(EngineError):
    """The client's request is invalid. `param` names the field."""

    category = "invalid_request"
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """A prompt, with the answer that was asked for, does not fit into the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        num_prompt_tokens: int = 0,
        max_tokens: int = 0,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens  # of prompt and answer together


class AuthenticationError(InvalidRequestError):
    """There is no API key, or it is wrong."""

    category = "authentication"
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(InvalidRequestError):
    """The key may not do this."""

    category = "forbidden"
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(InvalidRequestError):
    """There is nothing of this name: a path, a model, an object of the tenant."""

    category = "not_found"
    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The path has other methods."""

    category = "method_not_allowed"
    status = 405
    code = "method_not_allowed"


class RequestTimeoutError(EngineError):
    """The request's deadline passed before it was finished."""

    category = "timeout"
    status = 408
    type = "timeout_error"
    code = "timeout"


class ConflictError(InvalidRequestError):
    """The object is in a state in which this is not possible."""

    category = "conflict"
    status = 409
    code = "conflict"


class PayloadTooLargeError(InvalidRequestError):
    """The body is larger than `server.body_limit_mb` allows."""

    category = "payload_too_large"
    status = 413
    code = "payload_too_large"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The body is not JSON, or not a form where one is needed."""

    category = "unsupported_media_type"
    status = 415
    code = "unsupported_media_type"


class RateLimitError(EngineError):
    """A client sent too many requests or tokens. `retry_after` is in seconds."""

    category = "rate_limit"
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True


class UnavailableError(EngineError):
    """The server can't take requests: it is starting, draining or restarting its engine."""

    category = "unavailable"
    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"
    retryable = True


def error_from_code(code: str, message: str, retry_after: float | None = None) -> EngineError:
    """Rebuild an error from what another process sent."""
    pending: list[type[EngineError]] = [EngineError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind(message, retry_after=retry_after)
        pending.extend(kind.__subclasses__())
    return EngineError(message, code=code, retry_after=retry_after)
