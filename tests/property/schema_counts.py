"""Counts, for each keyword of the official JSON Schema test suite, the schemas that structured
output takes, the valid instances that their grammars accept, and the invalid ones that they refuse.

`python -m tests.property.schema_counts` prints the table of docs/schemas.md. The suite is read from
the source distribution of `jsonschema`, which is downloaded once. Properties of an object may have
any order: it is enough if the grammar accepts one of them.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.grammar.spec import grammar_text, unchecked_places
from engine.core.interfaces.backend import GrammarSpec
from tests.support.files.schema_suites import SUITE_DRAFTS, suite_folder

MAX_ORDERS = 24
TOKENIZER = byte_tokenizer()


@dataclass
class Count:
    num_schemas: int = 0
    num_taken: int = 0
    num_valid: int = 0
    num_accepted: int = 0
    num_invalid: int = 0  # only those of the schemas that are taken
    num_refused: int = 0

    def row(self, name: str) -> str:
        counts = (
            (self.num_taken, self.num_schemas),
            (self.num_accepted, self.num_valid),
            (self.num_refused, self.num_invalid),
        )
        return f"| {name} | " + " | ".join(f"{part} of {whole}" for part, whole in counts) + " |"


def grammar_of(schema: Any) -> str | None:
    """The grammar of a schema; None if the schema is refused or its grammar does not enforce it."""
    spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
    try:
        grammar = grammar_text(spec)
    except InvalidRequestError:
        return None
    if unchecked_places(spec) or problem_of(grammar, TOKENIZER) is not None:
        return None
    return grammar


def accepts(grammar: str, value: Any) -> bool:
    return any(_accepts_text(grammar, text) for text in itertools.islice(_texts(value), MAX_ORDERS))


def _accepts_text(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    tokens = list(text.encode(errors="surrogatepass"))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _texts(value: Any) -> Iterator[str]:
    """A JSON value with the properties of its outermost object in all orders."""
    if not isinstance(value, dict):
        yield json.dumps(value, ensure_ascii=False)
        return
    for items in itertools.permutations(value.items()):
        yield json.dumps(dict(items), ensure_ascii=False)


def count_group(count: Count, group: dict[str, Any], uri: str) -> list[str]:
    """Add one schema and its instances. Returns the invalid instances that are accepted."""
    schema = group["schema"]
    if isinstance(schema, dict):
        schema = {"$schema": uri, **schema}
    grammar = grammar_of(schema)
    count.num_schemas += 1
    count.num_taken += grammar is not None
    wrong = []
    for test in group["tests"]:
        if test["valid"]:
            count.num_valid += 1
            count.num_accepted += grammar is not None and accepts(grammar, test["data"])
        elif grammar is not None:
            refused = not accepts(grammar, test["data"])
            count.num_invalid += 1
            count.num_refused += refused
            if not refused:
                wrong.append(f"{group['description']}: {test['description']}")
    return wrong


def main() -> int:
    counts: dict[str, Count] = {}
    wrong: list[str] = []
    for draft, uri in SUITE_DRAFTS.items():
        for path in sorted((suite_folder() / draft).glob("*.json")):
            count = counts.setdefault(path.stem, Count())
            for group in json.loads(path.read_text(encoding="utf-8")):
                wrong += [f"{path.stem}: {each}" for each in count_group(count, group, uri)]
    print("| Keyword | Schemas taken | Valid accepted | Invalid refused |")
    print("| --- | --- | --- | --- |")
    for name, count in sorted(counts.items()):
        print(count.row(name))
    whole = Count()
    for count in counts.values():
        for field in vars(whole):
            setattr(whole, field, getattr(whole, field) + getattr(count, field))
    print(whole.row("all"))
    print(*(f"accepted, but not valid: {each}" for each in wrong), sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
