"""The way of a request through the code is short, and written once."""

import ast

from engine_tools.source_trees import dotted, is_within, sources

# The steps of `open_generation`: it begins the request, opens its prompts and reads their events.
STEPS = ("ticket.begin", "pump.open")
# Embeddings begin a request that generates nothing.
HOMES = {
    "engine.servers.serving.generation": STEPS,
    "engine.servers.openai.embeddings": ("ticket.begin",),
}


def test_routes_leave_opening_a_generation_to_one_function() -> None:
    wrong = [
        f"{source.at(node)} calls {dotted(node.func)}; call open_generation"
        for source in sources()
        if is_within(source.module, "engine.servers")
        for node in source.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if dotted(node.func) in STEPS and dotted(node.func) not in HOMES.get(source.module, ())
    ]
    assert not wrong
