"""The core of the runtime knows requests, tokens, rows, slots and blocks, and no feature."""

import dataclasses

from engine.runtime.sequence import Sequence
from engine_tools.source_trees import imports, is_within, sources

# The rooms of features that attach to the core of the runtime through `runtime/sequence.py`.
FEATURES = (
    "engine.runtime.groups",
    "engine.runtime.insight",
    "engine.runtime.interp",
    "engine.runtime.requests",
    "engine.runtime.speculation",
    "engine.runtime.tiers",
)
MAX_SEQUENCE_FIELDS = 25


def test_the_core_of_the_runtime_imports_no_feature() -> None:
    core = ("engine.runtime.scheduler", "engine.runtime.kv_cache", "engine.runtime.sequence_table")
    found = [each for each in sources() if each.module in core]
    assert len(found) == len(core)
    bad = [
        f"{source.at(node)} imports {target}"
        for source in found
        for node, target in imports(source)
        if any(is_within(target, feature) for feature in FEATURES)
    ]
    assert not bad


def test_a_sequence_knows_no_feature() -> None:
    """Features keep their own state of a sequence."""
    fields = dataclasses.fields(Sequence)
    assert len(fields) <= MAX_SEQUENCE_FIELDS, [each.name for each in fields]
