"""Who may send requests: API keys, and protection against web pages.

If keys are configured, all routes except `PUBLIC_ROUTES` need one. Admin routes need an admin key.

The check is a FastAPI dependency of all routes. It runs after routing, so it knows which route will
answer. The server keeps only SHA-256 digests of keys. Digests are compared in constant time, and
each key in a request is compared with all of them.

A web page can make a browser send requests to this server, even if the server listens on a loopback
address. Against DNS rebinding, only known `Host` names are accepted. Against CSRF, the `Origin`
header that browsers send is checked.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.config import is_loopback
from engine.core.config_schema import ServerSettings, Settings
from engine.core.config_types import MAX_SECRET_LENGTH
from engine.core.errors import (
    AuthenticationError,
    ConfigError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
)
from engine.core.interfaces.backend import ModelCard
from engine.core.key_file import NO_LIMITS, KeyEntry, KeyLimits, read_keys
from engine.servers.access.origins import AllowedOrigins
from engine.servers.http.errors import error_response
from engine.servers.http.request_log import record_of

if TYPE_CHECKING:
    from engine.servers.access.quotas import AuthThrottle

# Routes that need no key. `/health` and `/healthz` show only their status to clients without a key,
# and details to the others (see `probes.py`).
PUBLIC_ROUTES = frozenset(
    {"/livez", "/readyz", "/health", "/healthz", "/v2/health/live", "/v2/health/ready"}
)
ADMIN_PATH = "/v1/admin/"
# Routes of other servers' APIs that need the same rights as those below `ADMIN_PATH`.
ADMIN_ROUTES = frozenset(
    {
        *("/api/copy", "/api/create", "/api/delete", "/api/pull", "/flush_cache"),
        *("/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
# Admin routes that report how requests were routed. If there is no admin key and only one tenant,
# clients that may use all models may read them.
CLIENT_ROUTES = frozenset(
    {f"{ADMIN_PATH}routes", f"{ADMIN_PATH}routes/{{request_id}}", f"{ADMIN_PATH}shadow"}
)
# Routes below `ADMIN_PATH` that show each tenant its own requests. Any valid key may read them.
TENANT_ROUTES = frozenset({f"{ADMIN_PATH}requests", f"{ADMIN_PATH}requests/{{request_id}}"})

# Admin routes for which the node token is enough.
NODE_ROUTES = frozenset({f"{ADMIN_PATH}nodes", f"{ADMIN_PATH}nodes/{{name}}"})

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Paths that accept any `Host`, because orchestrators probe them by IP address.
_ANY_HOST_PATHS = frozenset({"/livez", "/readyz"})
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated tenant, who owns requests and cached prefixes. Only `name` identifies the
    tenant, and only `name` is compared. The other fields describe the API key of the request.
    """

    name: str
    key: str = field(default="", compare=False)  # the key's name; empty for the key in the settings
    limits: KeyLimits = field(default=NO_LIMITS, compare=False)
    is_admin: bool = field(default=False, compare=False)
    parse_special: bool = field(default=False, compare=False)  # the default of its requests
    # The models and LoRA adapters that the key may use. None: all of them.
    models: tuple[str, ...] | None = field(default=None, compare=False)

    def may_use(self, card: ModelCard) -> bool:
        """Whether requests with this key may use a model, and see that there is one."""
        is_allowed = self.models is None or card.id in self.models
        return is_allowed and (self.is_admin or card.tenant in (None, self.name))

    def view(self, card: ModelCard) -> ModelCard:
        """The card without the names of models that requests with this key may not use."""
        if self.models is None:
            return card
        root, parent = (each if each in self.models else None for each in (card.root, card.parent))
        return msgspec.structs.replace(card, root=root, parent=parent)

    def digest(self, text: str) -> str:
        """A hash of `text` that differs from the hash of any other tenant."""
        # A principal's name has no line break, so no two (principal, text) pairs collide.
        return hashlib.sha256(f"{self.name}\n{text}".encode()).hexdigest()


# The tenant of all clients if no key is configured.
ANYONE = Principal("")
ADMIN = Principal("admin", key="admin", is_admin=True)
# For work that no client has asked for, such as probes. It may use all models.
SERVER = Principal("server", is_admin=True)
NODES_ADMIN = Principal("nodes", key="nodes", is_admin=True)  # who has the node token

# Entry of the ASGI scope that marks requests which the server sends to itself, such as those of a
# batch. Its value is the `Principal` for whom the server acts. A client can't set this entry: what
# a client sends is stored in other entries of the scope, and never as a `Principal`.
_ACTING_FOR = "engine.acting_for"


class Authenticator:
    """FastAPI dependency that checks the API key of a request and stores its `Principal` in the
    request's state.
    """

    def __init__(self, settings: Settings, keys: "KeyRing", throttle: "AuthThrottle") -> None:
        token = settings.metrics.token
        self._keys = keys
        self._throttle = throttle
        self._metrics_token = None if token is None else digest_of(token.get_secret_value())
        self._metrics_route = settings.metrics.endpoint
        node_token = settings.server.node_token
        self._node_token = None if node_token is None else node_token.get_secret_value()

    async def __call__(self, request: Request) -> None:
        principal = self.identify(request)
        route = request.scope["route"].path
        if principal is None and route not in PUBLIC_ROUTES:
            if is_acting(request.scope):
                raise AuthenticationError(
                    "The API key that asked for this was removed; ask again with a valid one."
                )
            if _presented(request):
                await self._throttle.note_failure(request.client.host if request.client else "")
            raise AuthenticationError(
                "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            )
        if route == self._metrics_route and principal is not None and principal.models is not None:
            raise ForbiddenError(
                "This key is limited to some models, and the metrics are of all of them; use the"
                " token of metrics.token, or a key without this limit."
            )
        is_administrative = route.startswith(ADMIN_PATH) or route in ADMIN_ROUTES
        is_administrative = is_administrative and route not in TENANT_ROUTES
        if principal is not None and is_administrative:
            self._check_admin(request, principal)
        request.state.principal = principal

    def identify(self, request: Request) -> Principal | None:
        """The principal of the key in the request. None if the route needs a key and the request
        has no valid one. If no key is needed, returns `ANYONE`.
        """
        accepted = [(each.digest, each.principal) for each in self._keys.credentials]
        is_open = not self._keys.has_users
        if request.scope["route"].path == self._metrics_route and self._metrics_token is not None:
            accepted.append((self._metrics_token, principal_of_digest(self._metrics_token)))
            is_open = False
        if request.scope["route"].path in NODE_ROUTES and self._node_token is not None:
            if _proves_node_token(request, self._node_token):
                return NODES_ADMIN
            accepted.append((digest_of(self._node_token), NODES_ADMIN))
            is_open = False
        acting_for = request.scope.get(_ACTING_FOR)
        if isinstance(acting_for, Principal):
            return self._keys.current(acting_for)
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
        is_report = request.scope["route"].path in CLIENT_ROUTES
        if not (is_report and self._keys.shows_routes(principal)) and not self._keys.all_are_admins:
            raise ForbiddenError(
                "This needs an administrator's key, and the server has none: set"
                " LLM_ENGINE_ADMIN_KEY or server.admin_key_file and start the server again."
            )


def _proves_node_token(request: Request, token: str) -> bool:
    from engine.routing.nodes.proofs import is_proved  # imported late: few servers have nodes

    what = f"{request.method} {request.url.path.removeprefix(ADMIN_PATH)}"
    given = request.headers.getlist("authorization")[:1]
    return any(is_proved(token.encode(), what, each) for each in given)


def act_for(scope: MutableMapping[str, Any], principal: Principal) -> None:
    """Mark a request that the server sends to itself as sent for `principal`. `scope` is its ASGI
    scope.
    """
    scope[_ACTING_FOR] = principal


def is_acting(scope: MutableMapping[str, Any]) -> bool:
    """Whether the server sent this request to itself, for example as one line of a tenant's
    batch.
    """
    return isinstance(scope.get(_ACTING_FOR), Principal)


def principal_of(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def may_administer(request: Request, keys: "KeyRing") -> bool:
    """Whether the request may use admin routes. For routes that do more for admins."""
    return principal_of(request).is_admin or keys.all_are_admins


def may_read_routes(request: Request, keys: "KeyRing") -> bool:
    """Whether the request may learn how requests were routed, as `CLIENT_ROUTES` tell it."""
    return keys.shows_routes(principal_of(request)) or may_administer(request, keys)


def principal_of_digest(digest: bytes) -> Principal:
    return Principal(digest.hex()[:32])


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _presented(request: Request) -> list[bytes]:
    """Digests of the API keys in the request's headers. Reads at most 8 keys and skips overlong
    ones.
    """
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
    """All accepted API keys: `server.api_key`, the keys of the keys file, and the admin key."""

    def __init__(self, server: ServerSettings) -> None:
        self.entries: tuple[KeyEntry, ...] = ()
        self.credentials: tuple[Credential, ...] = ()
        self._is_local = is_loopback(server.host)
        self.load(server)

    @property
    def has_users(self) -> bool:
        """Whether ordinary requests need a key: true if there is any key besides admin keys."""
        return any(not each.principal.is_admin for each in self.credentials)

    @property
    def has_admin(self) -> bool:
        return any(each.principal.is_admin for each in self.credentials)

    @property
    def all_are_admins(self) -> bool:
        """Whether all clients are admins: no keys are set, and only this machine can reach the
        server.
        """
        return not self.credentials and self._is_local

    def shows_routes(self, principal: Principal) -> bool:
        """Whether reports on how all requests were routed are for this client, too."""
        tenants = {each.principal for each in self.credentials}
        return not self.has_admin and len(tenants) <= 1 and principal.models is None

    def current(self, principal: Principal) -> Principal | None:
        """The key of `principal` with the limits that it has now. None if the key was removed. A
        key that was replaced under its name is the same key.
        """
        if not self.has_users and principal == ANYONE:
            return ANYONE
        known = (each.principal for each in self.credentials)
        return next((it for it in known if it == principal and it.key == principal.key), None)

    def label(self, principal: Principal) -> str:
        """The tenant's name in the keys file. Empty for tenants that are not in the file."""
        for entry in self.entries:
            if _principal(entry) == principal:
                return entry.tenant_name
        return ""

    def load(self, server: ServerSettings) -> None:
        """Load all keys from `server` and the keys file. If this raises a `ConfigError`, the
        previous keys stay valid.
        """
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
                f"the keys file {server.keys_file} has no key for clients, so every client would"
                " be let in: make one with `engine keys new NAME`",
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
    """The principal of a key in the keys file. All keys of a tenant have the same principal name,
    so a key can be replaced without losing access to stored data.
    """
    tenant = hashlib.sha256(f"tenant\n{entry.tenant_name}".encode()).hexdigest()[:32]
    is_admin = entry.role == "admin"
    return Principal(
        tenant,
        key=entry.name,
        limits=entry,
        is_admin=is_admin,
        parse_special=entry.parse_special,
        models=entry.models,
    )


class BrowserGuard:
    """Refuses requests with an unknown `Host`. Also refuses state-changing methods, such as POST,
    from web pages of other origins.
    """

    def __init__(self, app: ASGIApp, server: ServerSettings) -> None:
        self._app = app
        bound = _bracketed(server.host.lower())
        self._hosts = {
            *LOOPBACK_NAMES,
            bound,
            *(_bracketed(h.lower()) for h in server.allowed_hosts),
        }
        # DNS rebinding needs a host name. Numeric addresses can't be rebound, so a server bound to
        # all interfaces accepts any numeric `Host`.
        self._any_address = bound in ("0.0.0.0", "[::]")
        self._origins = AllowedOrigins(server.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        record_of(scope).error_code = error.error_code
        await error_response(error, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> EngineError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if scope["path"] not in _ANY_HOST_PATHS and not self._is_known(hosts):
            return InvalidRequestError(
                "The Host header names a host that this server does not answer for;"
                " add it to server.allowed_hosts.",
                code="invalid_host",
            )
        if scope["method"] in _READING_METHODS:
            return None
        if all(self._is_friendly(origin, hosts) for origin in headers.getlist("origin")):
            return None
        return ForbiddenError(
            "Requests from this web origin are refused; enable server.enable_cors and list it in"
            " server.cors_origins."
        )

    def _is_known(self, hosts: Iterable[str]) -> bool:
        names = [_host_name(host) for host in hosts]
        if len(names) != 1:
            return False
        name = names[0]
        return (
            "*" in self._hosts or name in self._hosts or (self._any_address and _is_address(name))
        )

    def _is_friendly(self, origin: str, hosts: list[str]) -> bool:
        if origin in self._origins:
            return True
        try:
            return [urlsplit(origin).netloc.lower()] == [host.lower() for host in hosts]
        except ValueError:
            return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _host_name(host: str) -> str:
    """The host without its port. A malformed host is returned unchanged; it matches no known
    name.
    """
    name, colon, port = host.lower().rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.startswith("[")):
        return name
    return host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
