"""The folded graph in Graphviz' language: a box for each layer and each step around its nodes."""

from collections.abc import Iterator, Sequence

from engine.cli.graph_facts import Report
from engine.cli.graph_fold import BEFORE, Section, by_nodes, fold
from engine.cli.graph_text import header, node_value, node_weight, step_caption


def graph_dot(report: Report) -> str:
    sections = fold(report)
    lines = [
        "digraph model {",
        f"  label={_quoted(header(report))}; labelloc=t;",
        '  node [shape=box, fontname="monospace", fontsize=10];',
        '  graph [fontname="monospace", fontsize=10, labeljust=l];',
    ]
    last = None
    for number, section in enumerate(sections):
        lines += _section(number, section, report)
        lines += _edges(number, section, last)
        last = _id(number, section.nodes[-1].name)
    return "\n".join([*lines, "}"])


def _section(number: int, section: Section, report: Report) -> Iterator[str]:
    yield f"  subgraph cluster_{number} {{"
    if section.layers:
        yield f"    label={_quoted([section.title])}; style=rounded;"
    else:
        yield '    label=""; peripheries=0;'
    for index, (nodes, steps) in enumerate(by_nodes(section)):
        yield f"    subgraph cluster_{number}_{index} {{"
        captions = [line for step in steps for line in step_caption(step, report)]
        yield f'      label={_quoted(captions)}; style=filled; color="#e8eef7";'
        for node in nodes:
            words = [f"{node.name}: {node.op}", *map(node_weight, node.weights), node_value(node)]
            yield f"      {_id(number, node.name)} [label={_quoted(words)}];"
        yield "    }"
    yield "  }"


def _edges(number: int, section: Section, last: str | None) -> Iterator[str]:
    own = {node.name for node in section.nodes}
    for node in section.nodes:
        for name in node.inputs:
            if name in own:
                yield f"  {_id(number, name)} -> {_id(number, node.name)};"
            elif name == BEFORE and last is not None:
                yield f"  {last} -> {_id(number, node.name)};"


def _id(number: int, name: str) -> str:
    return _quoted([f"{number}/{name}"])


def _quoted(lines: Sequence[str]) -> str:
    r"""Lines in quotes; \l ends one that is aligned left."""
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    if len(escaped) == 1:
        return f'"{escaped[0]}"'
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"'
