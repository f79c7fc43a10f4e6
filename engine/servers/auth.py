"""Who is asking. Every route needs the key unless it is on the short list of probes here.

The check is a dependency of the whole application, so it runs after routing and sees the route that
will answer, never a path rebuilt from headers. Keys are kept and compared as SHA-256 digests, in
constant time.
"""

import hashlib
import hmac
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr
from starlette.requests import Request

from engine.core.config_schema import MAX_SECRET_LENGTH, Settings
from engine.core.errors import AuthenticationError

# `/health` tells anyone its status, and the rest only to a key: see `health.py`.
PUBLIC_ROUTES = frozenset({"/livez", "/readyz", "/health"})


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant: who owns a submission, and whose cached prefixes are whose."""

    name: str


# Without a configured key everybody on this machine is one tenant.
ANYONE = Principal("")

# Where a scope that this process made itself says whom it is for. A scope that the HTTP server made
# never has it: what a client sends is a value under other keys, and no object in any case.
_ACTING_FOR = "engine.acting_for"


class Authenticator:
    """Called as a FastAPI dependency; leaves the `Principal` in the request's state."""

    def __init__(self, settings: Settings) -> None:
        self._api_key = _digest_of(settings.server.api_key)
        self._metrics_token = _digest_of(settings.metrics.token)
        self._metrics_route = settings.metrics.endpoint

    async def __call__(self, request: Request) -> None:
        principal = self.identify(request)
        route = request.scope["route"].path
        if principal is None and route not in PUBLIC_ROUTES:
            raise AuthenticationError(
                "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            )
        request.state.principal = principal

    def identify(self, request: Request) -> Principal | None:
        """Who the request's keys say it is, for the route it goes to; None for nobody."""
        accepted = [self._api_key] if self._api_key is not None else []
        if request.scope["route"].path == self._metrics_route and self._metrics_token is not None:
            accepted.append(self._metrics_token)
        acting_for = request.scope.get(_ACTING_FOR)
        if isinstance(acting_for, Principal):
            # Work that was left by a key which is no longer accepted is refused like the key.
            current = [_principal(each) for each in accepted] or [ANYONE]
            return acting_for if acting_for in current else None
        if not accepted:
            return ANYONE
        matched: bytes | None = None
        for presented in _presented(request):
            for expected in accepted:
                if hmac.compare_digest(presented, expected):
                    matched = expected
        return None if matched is None else _principal(matched)


def act_for(scope: MutableMapping[str, Any], principal: Principal) -> None:
    """Make a request of the server's own, in `scope`, one of `principal`'s."""
    scope[_ACTING_FOR] = principal


def principal_of(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _principal(digest: bytes) -> Principal:
    return Principal(digest.hex()[:32])


def _digest_of(secret: SecretStr | None) -> bytes | None:
    return None if secret is None else _digest(secret.get_secret_value())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _presented(request: Request) -> list[bytes]:
    """Digests of the keys in all the headers where clients put them."""
    keys = request.headers.getlist("x-api-key") + request.headers.getlist("api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(key.strip())
    return [_digest(key) for key in keys[:8] if len(key) <= MAX_SECRET_LENGTH]
