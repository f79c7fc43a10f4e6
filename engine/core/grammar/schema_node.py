"""One schema of a document, between the client's form and that for llguidance."""

from typing import Any

from engine.core.grammar.schema_logic import Schema


class Node:
    """A schema while it is rewritten. `source` has the keywords of the client's schema, `output`
    those of the schema for llguidance.
    """

    def __init__(self, source: dict[str, Any], path: str) -> None:
        self.source = source
        self.path = path
        self.output: dict[str, Any] = {}

    def demand(self, *schemas: Schema) -> None:
        self.output.setdefault("allOf", []).extend(schemas)

    def narrow(self, keyword: str, bound: float) -> None:
        """Set the keyword `minimum` or `maximum` to `bound`, unless its bound is already
        tighter.
        """
        tighter = max if keyword == "minimum" else min
        self.output[keyword] = tighter(bound, self.output.get(keyword, bound))

    def match(self, expression: str) -> None:
        if "pattern" in self.output:
            self.demand({"pattern": expression})
        else:
            self.output["pattern"] = expression
