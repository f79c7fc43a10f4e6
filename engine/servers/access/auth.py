"""Who is asking. Every route needs a key unless it is on the short list of probes here, and those
that administer the server need the administrator's, if there is one.

The check is a dependency of the whole application, so it runs after routing and sees the route that
will answer, never a path rebuilt from headers. Keys are kept and compared as SHA-256 digests, in
constant time, and all of them are always compared.
"""

import hashlib
import hmac
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from starlette.requests import Request

from engine.core.config import is_loopback
from engine.core.config_schema import MAX_SECRET_LENGTH, ServerSettings, Settings
from engine.core.errors import AuthenticationError, ConfigError, ForbiddenError
from engine.core.key_file import NO_LIMITS, KeyEntry, KeyLimits, read_keys

if TYPE_CHECKING:
    from engine.servers.access.quotas import AuthThrottle

# `/health` tells anyone its status, and the rest only to a key: see `health.py`.
PUBLIC_ROUTES = frozenset({"/livez", "/readyz", "/health"})
ADMIN_PATH = "/v1/admin/"
# What any client may look at as long as there is no administrator: how requests are routed.
CLIENT_ROUTES = frozenset(
    {f"{ADMIN_PATH}routes", f"{ADMIN_PATH}routes/{{request_id}}", f"{ADMIN_PATH}shadow"}
)


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant: who owns a submission, and whose cached prefixes are whose. The rest is about the
    key that it came with.
    """

    name: str
    key: str = field(default="", compare=False)  # its name; empty for the one in the settings
    limits: KeyLimits = field(default=NO_LIMITS, compare=False)
    is_admin: bool = field(default=False, compare=False)


# Without a configured key everybody on this machine is one tenant.
ANYONE = Principal("")
ADMIN = Principal("admin", key="admin", is_admin=True)

# Where a scope that this process made itself says whom it is for. A scope that the HTTP server made
# never has it: what a client sends is a value under other keys, and no object in any case.
_ACTING_FOR = "engine.acting_for"


class Authenticator:
    """Called as a FastAPI dependency; leaves the `Principal` in the request's state."""

    def __init__(self, settings: Settings, keys: "KeyRing", throttle: "AuthThrottle") -> None:
        token = settings.metrics.token
        self._keys = keys
        self._throttle = throttle
        self._metrics_token = None if token is None else digest_of(token.get_secret_value())
        self._metrics_route = settings.metrics.endpoint
        self._is_local = is_loopback(settings.server.host)

    async def __call__(self, request: Request) -> None:
        principal = self.identify(request)
        route = request.scope["route"].path
        if principal is None and route not in PUBLIC_ROUTES:
            if _presented(request):
                await self._throttle.note_failure(request.client.host if request.client else "")
            raise AuthenticationError(
                "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            )
        if principal is not None and route.startswith(ADMIN_PATH):
            self._check_admin(request, principal)
        request.state.principal = principal

    def identify(self, request: Request) -> Principal | None:
        """Who the request's keys say it is, for the route it goes to; None for nobody."""
        accepted = [(each.digest, each.principal) for each in self._keys.credentials]
        is_open = not self._keys.has_users
        if request.scope["route"].path == self._metrics_route and self._metrics_token is not None:
            accepted.append((self._metrics_token, principal_of_digest(self._metrics_token)))
            is_open = False
        acting_for = request.scope.get(_ACTING_FOR)
        if isinstance(acting_for, Principal):
            # Work that was left by a key which is no longer accepted is refused like the key.
            current = [principal for _, principal in accepted] + [ANYONE] * is_open
            return next((each for each in current if each == acting_for), None)
        matched = ANYONE if is_open else None
        for presented in _presented(request):
            for expected, principal in accepted:
                if hmac.compare_digest(presented, expected):
                    matched = principal
        return matched

    def _check_admin(self, request: Request, principal: Principal) -> None:
        if principal.is_admin:
            return
        if self._keys.has_admin:
            if principal is ANYONE:
                raise AuthenticationError(
                    "The administrator's key is needed: send it as 'Authorization: Bearer KEY'."
                )
            raise ForbiddenError("This key is not the administrator's.")
        # Whoever alone can reach the server may do all.
        is_alone = not self._keys.has_users and self._is_local
        if request.scope["route"].path not in CLIENT_ROUTES and not is_alone:
            raise ForbiddenError(
                "This needs an administrator's key, and the server has none: set"
                " LLM_ENGINE_ADMIN_KEY or server.admin_key_file and start the server again."
            )


def act_for(scope: MutableMapping[str, Any], principal: Principal) -> None:
    """Make a request of the server's own, in `scope`, one of `principal`'s."""
    scope[_ACTING_FOR] = principal


def is_acting(scope: MutableMapping[str, Any]) -> bool:
    """Whether the request is the server's own, for somebody who left it work."""
    return isinstance(scope.get(_ACTING_FOR), Principal)


def principal_of(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def principal_of_digest(digest: bytes) -> Principal:
    return Principal(digest.hex()[:32])


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _presented(request: Request) -> list[bytes]:
    """Digests of the keys in all the headers where clients put them."""
    keys = request.headers.getlist("x-api-key") + request.headers.getlist("api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(key.strip())
    return [digest_of(key) for key in keys[:8] if len(key) <= MAX_SECRET_LENGTH]


@dataclass(frozen=True, slots=True)
class Credential:
    digest: bytes
    principal: Principal


class KeyRing:
    """The one key of the settings, those of the keys file, and the administrator's."""

    def __init__(self, server: ServerSettings) -> None:
        self.entries: tuple[KeyEntry, ...] = ()
        self.credentials: tuple[Credential, ...] = ()
        self.load(server)

    @property
    def has_users(self) -> bool:
        """Whether a key is needed for anything but administration."""
        return any(not each.principal.is_admin for each in self.credentials)

    @property
    def has_admin(self) -> bool:
        return any(each.principal.is_admin for each in self.credentials)

    def label(self, principal: Principal) -> str:
        """The tenant's name, as the keys file has it."""
        for entry in self.entries:
            if _principal(entry) == principal:
                return entry.tenant_name
        return ""

    def load(self, server: ServerSettings) -> None:
        """All at once, or, with a `ConfigError`, nothing: the keys of before stay."""
        entries = read_keys(server.keys_file) if server.keys_file is not None else ()
        found = _of_settings(server.api_key, server.admin_key)
        found += [Credential(bytes.fromhex(each.sha256), _principal(each)) for each in entries]
        digests = [each.digest for each in found]
        if len(set(digests)) < len(digests):
            raise ConfigError(
                "one key is given twice: the API key, the administrator's key and each key of the"
                " keys file must differ",
                param="server.keys_file",
            )
        if server.keys_file is not None and all(each.principal.is_admin for each in found):
            raise ConfigError(
                f"the keys file {server.keys_file} has no key for clients, so that anybody would be"
                " let in: make one with `engine keys new NAME`",
                param="server.keys_file",
            )
        self.entries, self.credentials = entries, tuple(found)


def _of_settings(api_key: SecretStr | None, admin_key: SecretStr | None) -> list[Credential]:
    found = []
    if api_key is not None:
        digest = digest_of(api_key.get_secret_value())
        found.append(Credential(digest, principal_of_digest(digest)))
    if admin_key is not None:
        found.append(Credential(digest_of(admin_key.get_secret_value()), ADMIN))
    return found


def _principal(entry: KeyEntry) -> Principal:
    """All keys of a tenant are one owner, so that a key can be replaced without losing anything."""
    tenant = hashlib.sha256(f"tenant\n{entry.tenant_name}".encode()).hexdigest()[:32]
    is_admin = entry.role == "admin"
    return Principal(tenant, key=entry.name, limits=entry, is_admin=is_admin)
