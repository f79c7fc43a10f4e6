"""Mutations by part of the tree, one module each."""

import importlib
import pkgutil

from tests.teeth.mutation import Mutation


def all_areas() -> list[Mutation]:
    found = pkgutil.walk_packages(__path__, f"{__name__}.")
    names = sorted(each.name for each in found if not each.ispkg)
    modules = [importlib.import_module(name) for name in names]
    return [mutation for module in modules for mutation in module.MUTATIONS]
