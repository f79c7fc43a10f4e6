"""Reads and writes the keys file: a server's API keys, each with a name, a tenant and limits.

The file is JSON, because programs write it. It does not contain the keys, only their SHA-256
digests. Keys are long and random, so a slow hash is not needed. Only the file's owner can read the
file.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from engine.core.config_schema import LimitsSettings
from engine.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    disk_full_error,
    is_disk_full,
)
from engine.core.sandbox.private_files import ForeignFileError, open_private, write_private

KEY_BYTES = 32
KEY_PREFIX = "ek-"
MAX_FILE_BYTES = 16 * 2**20
LIMIT_NAMES = (
    *("requests_per_minute", "tokens_per_minute"),
    *("max_concurrent", "max_queued", "max_queued_tokens"),
)

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}\Z")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,256}\Z")]
Rate = Annotated[int, msgspec.Meta(ge=1, le=10**12)] | None
Places = Annotated[int, msgspec.Meta(ge=1, le=65536)] | None
Role = Literal["user", "admin"]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one API key. If a limit is None, the limit in the settings applies. If that is None
    too, there is no limit.
    """

    requests_per_minute: Rate = None
    tokens_per_minute: Rate = None
    max_concurrent: Places = None
    max_queued: Places = None
    max_queued_tokens: Rate = None

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in LIMIT_NAMES)

    def over(self, defaults: LimitsSettings) -> "KeyLimits":
        """These limits, with the limit of `defaults` in place of each limit that is None."""
        own = {name: getattr(self, name) for name in LIMIT_NAMES}
        return KeyLimits(
            **{name: getattr(defaults, name) if own[name] is None else own[name] for name in own}
        )


NO_LIMITS = KeyLimits()


class KeyEntry(
    KeyLimits, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    name: Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Name | None = None  # None: the tenant has the key's name
    role: Role = "user"
    created: str = ""
    # Whether names of control tokens in the key's prompts become these tokens, if a request does
    # not say.
    parse_special: bool = False
    # The models and LoRA adapters that the key may use. None: all of them.
    models: tuple[ModelName, ...] | None = None

    @property
    def tenant_name(self) -> str:
        return self.tenant or self.name

    def public(self) -> dict[str, Any]:
        """The fields that may be shown: all except the key's digest."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        shown.pop("sha256")
        return shown | {"tenant": self.tenant_name, "role": self.role}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...] = ()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Read the keys file. Raises a `ConfigError` that names the file and the mistake, if the file
    is invalid, missing or not private.
    """
    path = path.expanduser()
    try:
        with open_private(path) as file:
            content = file.read(MAX_FILE_BYTES)
    except ForeignFileError as error:
        raise _unusable(path, f"{error}; `chmod 600` it, as its owner") from None
    except FileNotFoundError:
        raise _unusable(path, "it does not exist; `engine keys new NAME` makes it") from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    try:
        keys = msgspec.json.decode(content, type=_File).keys
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from None
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise _unusable(path, f"two keys have the same {field}")
    return keys


def add_key(
    path: Path,
    name: str,
    *,
    tenant: str | None = None,
    role: Role = "user",
    parse_special: bool = False,
    models: Sequence[str] | None = None,
    limits: Mapping[str, int | None] | None = None,
) -> tuple[str, KeyEntry]:
    """Create an API key and write its entry to the file. Returns the key and its entry. The file
    does not contain the key itself, so the key can't be shown again.
    """
    path = path.expanduser()
    keys = read_keys(path) if path.exists() else ()
    if any(key.name == name for key in keys):
        raise ConflictError(f"There is a key '{name}' already; remove it, or choose another name.")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    fields = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": tenant,
        "role": role,
        "parse_special": parse_special,
        "models": models,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **(limits or {}),
    }
    try:
        entry = msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this can't be a key: {error}") from None
    _write(path, (*keys, entry))
    return key, entry


def remove_key(path: Path, name: str) -> KeyEntry:
    path = path.expanduser()
    keys = read_keys(path)
    for key in keys:
        if key.name == name:
            _write(path, tuple(each for each in keys if each is not key))
            return key
    raise NotFoundError(f"There is no key '{name}' in {path.name}.")


def set_limits(path: Path, name: str, limits: Mapping[str, int | None]) -> KeyEntry:
    """Change limits of an API key in the file. Limits that are not given stay as they are."""
    path = path.expanduser()
    keys = read_keys(path)
    for position, key in enumerate(keys):
        if key.name == name:
            try:
                changed = msgspec.convert(msgspec.structs.asdict(key) | dict(limits), KeyEntry)
            except msgspec.ValidationError as error:
                raise ConfigError(f"these can't be limits: {error}") from None
            _write(path, (*keys[:position], changed, *keys[position + 1 :]))
            return changed
    raise NotFoundError(f"There is no key '{name}' in {path.name}.")


def _write(path: Path, keys: tuple[KeyEntry, ...]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, msgspec.json.format(msgspec.json.encode(_File(keys)), indent=2) + b"\n")
    except OSError as error:
        if is_disk_full(error):
            raise disk_full_error() from None
        raise _unusable(path, error.strerror or str(error)) from None


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"the keys file {path} can't be used: {reason}", param="server.keys_file")
