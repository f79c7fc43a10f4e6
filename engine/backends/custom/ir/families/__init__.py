"""Graphs of the model families: a module each, found by the family's name."""

from importlib import import_module
from importlib.util import find_spec

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir.graph import Graph
from engine.core.errors import ModelFormatError


def build_graph(config: ModelConfig) -> Graph:
    """The model's graph, made by `build(config)` of the module that is named after its family."""
    name = f"{__name__}.{config.family}"
    if not config.family.isidentifier() or find_spec(name) is None:
        raise ModelFormatError(f"there is no graph for models of the family '{config.family}'")
    graph: Graph = import_module(name).build(config)
    return graph
