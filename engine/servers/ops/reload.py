"""Reloads settings while the server runs: API keys, limits and the log level.

Settings are read again from where they came at startup. If a setting is invalid, nothing changes.
Changes of other settings take effect at the next start.
"""

import asyncio
import logging
from typing import Any

from engine.core.config_schema import SECTIONS, Settings
from engine.core.errors import ConfigError, EngineError
from engine.core.observability.logging import set_level
from engine.servers.ops.audit import AuditLog
from engine.servers.serving.services import Services

logger = logging.getLogger(__name__)

# Settings that a reload applies at once. The section `limits` is applied at once too.
LIVE_KEYS = frozenset(
    {
        *("server.api_key", "server.api_key_file", "server.admin_key", "server.admin_key_file"),
        *("server.keys_file", "logging.level"),
    }
)


def audit_of(services: Services) -> AuditLog:
    return AuditLog(services.settings.storage.directory)


async def set_log_level(services: Services, level: str) -> dict[str, Any]:
    """Set the log level in this process and in its engine processes. Returns the previous level as
    `before`. If some engines could not be changed, `untold` lists them.
    """
    before = set_level(level)
    untold = await services.backend.set_log_level(level)
    return {"before": before} | ({"untold": list(untold)} if untold else {})


async def reload_settings(services: Services, who: str) -> None:
    """Reload the settings after a signal. Errors are only logged."""
    try:
        await reread(services, who)
    except EngineError as error:
        logger.error("nothing was changed: %s", error)


async def reread(services: Services, who: str) -> dict[str, Any]:
    """Reload the settings. Returns what is in use now: the number of keys, the log level, and the
    changed settings that need a restart. Raises `ConfigError` if a setting is invalid.
    """
    async with audit_of(services).change(who, "reload") as detail:
        new = await _settings(services)
        await asyncio.to_thread(services.keys.load, new.server)
        services.quotas.set_defaults(new.limits)
        await set_log_level(services, new.logging.level)
        detail |= {"keys": len(services.keys.credentials), "log_level": new.logging.level}
        waiting = _needs_restart(services.settings, new)
        if waiting:
            logger.warning("these changes wait for a restart: %s", ", ".join(waiting))
            detail["needs_restart"] = waiting
    logger.info("keys, limits and the log level were read again")
    return detail


async def _settings(services: Services) -> Settings:
    if services.reread is None:
        return services.settings
    new = await asyncio.to_thread(services.reread)
    had_keys = services.keys.has_users
    if had_keys and new.server.api_key is None and new.server.keys_file is None:
        raise ConfigError("the settings have no key any more; stop the server to open it to all")
    return new


def _needs_restart(old: Settings, new: Settings) -> list[str]:
    changed = []
    for section in SECTIONS:
        if section == "limits":
            continue
        before, after = getattr(old, section), getattr(new, section)
        changed += [
            f"{section}.{key}"
            for key in type(before).model_fields
            if getattr(before, key) != getattr(after, key)
        ]
    return [key for key in changed if key not in LIVE_KEYS]
