"""The registry of plugins. Their names are those of the tables `[plugins.NAME]`.

A package adds a plugin with an entry point in the group `engine.plugins`. The value of the entry
point is the package's `InferencePlugin` class, as "module:ClassName".
"""

from typing import Any

from engine.core.registry.registry import Registry

_PLUGINS = Registry(
    kind="plugin",
    builtin={
        "pii_redactor": "engine.plugins.pii:PiiRedactor",
        "audit_log": "engine.plugins.audit_log:RequestAudit",
    },
    group="engine.plugins",
)


def plugin_names() -> tuple[str, ...]:
    return _PLUGINS.names()


def plugin_class(name: str) -> Any:
    return _PLUGINS.load(name)
