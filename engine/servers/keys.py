"""The keys that a server accepts now; they can be replaced while it runs."""

import hashlib
from dataclasses import dataclass

from pydantic import SecretStr

from engine.core.config_schema import ServerSettings
from engine.core.errors import ConfigError
from engine.core.key_file import KeyEntry, read_keys
from engine.servers.auth import ADMIN, Principal, digest_of, principal_of_digest


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
