"""Maps names to objects that are imported when they are requested.

Built-in entries are "module" or "module:attr" strings. Other packages add entries through a group
of entry points. A package can't replace a built-in name.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Registry:
    """A registry of objects of one kind, for example "backend". An object is imported when it is
    requested by its name.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], group: str) -> None:
        self._kind = kind
        self._builtin = dict(builtin)
        self._group = group

    def names(self) -> tuple[str, ...]:
        """Every known name, built-in ones first. Imports nothing."""
        added = {point.name for point in self._entry_points()} - self._builtin.keys()
        return (*self._builtin, *sorted(added))

    def load(self, name: str) -> Any:
        """Import and return the object called `name`."""
        target = self._builtin.get(name) or self._added_target(name)
        module_name, _, attribute = target.partition(":")
        try:
            module = import_module(module_name)
        except ImportError as error:
            raise ConfigError(
                f"{self._kind} '{name}' cannot be loaded: {error}. "
                "Install the package that it comes from together with the extra that it needs."
            ) from error
        if not attribute:
            return module
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            raise ConfigError(
                f"{self._kind} '{name}' cannot be loaded: {module_name} has no '{attribute}'"
            ) from error

    def load_all(self) -> Iterator[tuple[str, Any]]:
        """Yield all names with their objects, built-in names first. Each object is imported when it
        is yielded.
        """
        for name in self._builtin:
            yield name, self.load(name)
        for name in self.names()[len(self._builtin) :]:
            yield name, self.load(name)

    def _added_target(self, name: str) -> str:
        targets = {point.value for point in self._entry_points() if point.name == name}
        if not targets:
            known = ", ".join(self.names())
            raise ConfigError(f"unknown {self._kind} '{name}' (known: {known})")
        if len(targets) > 1:
            raise ConfigError(
                f"{self._kind} '{name}' is provided by more than one installed package: "
                f"{', '.join(sorted(targets))}. Uninstall all but one."
            )
        return targets.pop()

    def _entry_points(self) -> "list[EntryPoint]":
        from importlib.metadata import entry_points  # imported late: built-in names don't need it

        return list(entry_points(group=self._group))
