"""Mutations by part of the tree, one module each."""

import importlib
import pkgutil

from tests.teeth.mutation import Mutation


def all_rooms() -> list[Mutation]:
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [mutation for module in modules for mutation in module.MUTATIONS]
