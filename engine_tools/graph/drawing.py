"""Draws a model's graph as SVG or for Graphviz, with identical layers merged. Beside each group of
nodes are the plan steps (kernel calls) that compute it.

The SVG layout is simple, because a decoder's graph is nearly a chain. Nodes are stacked from top to
bottom, an arrow leads from each node to the next, and a curve shows a value that is used farther
down.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from engine.core.errors import ConfigError
from engine_tools.graph.facts import (
    BEFORE,
    GraphSection,
    NodeFacts,
    Report,
    StepFacts,
    by_nodes,
    fold,
)
from engine_tools.graph.text import graph_text, header, node_value, node_weight, step_caption

_LINE, _PAD, _GAP = 15, 6, 14  # pixels: line height, padding inside a box, gap between boxes
_LEFT, _NODE_WIDTH = 150, 330
_STEP_LEFT, _STEP_WIDTH = _LEFT + _NODE_WIDTH + 60, 430
_WIDTH = _STEP_LEFT + _STEP_WIDTH + 30
# How far a curve bends to the left: a share of its length (20 pixels are added), and the max in
# pixels.
_BEND, _BEND_MOST = 0.35, 115
_STYLE = """
text { font: 11px monospace; fill: #222 } .title { font-weight: bold }
.node { fill: #fff; stroke: #555 } .step { fill: #e8eef7; stroke: #7a93b8 }
.share { fill: #f4b183 } .section { fill: none; stroke: #999; stroke-dasharray: 5 4 }
.edge { fill: none; stroke: #555; marker-end: url(#tip) } .does { fill: none; stroke: #7a93b8 }
"""


@dataclass(frozen=True, slots=True)
class _Box:
    left: int
    top: int
    width: int
    height: int

    @property
    def middle(self) -> int:
        return self.top + self.height // 2

    @property
    def bottom(self) -> int:
        return self.top + self.height


@dataclass
class _Drawing:
    report: Report
    back: ElementTree.Element = field(default_factory=lambda: ElementTree.Element("g"))
    front: ElementTree.Element = field(default_factory=lambda: ElementTree.Element("g"))
    y: int = _PAD
    nodes: list[_Box] = field(default_factory=list)

    def section(self, section: GraphSection) -> None:
        before, top = self.nodes[-1] if self.nodes else None, self.y
        if section.layers:
            self.y += _PAD
            self.text(section.title, _STEP_LEFT - 40, self.y, "title")
            self.y += _LINE + _PAD
        boxes: dict[str, _Box] = {}
        for nodes, steps in by_nodes(section):
            self.group(nodes, steps, boxes)
        for node in section.nodes:
            for name in node.inputs:
                source = before if name == BEFORE else boxes.get(name)
                if source is not None and node.name in boxes:
                    self.edge(source, boxes[node.name])
        if section.layers:
            self.rect(_Box(10, top, _WIDTH - 20, self.y - top), "section")
            self.y += _GAP

    def group(self, nodes: list[NodeFacts], steps: list[StepFacts], boxes: dict[str, _Box]) -> None:
        """Draw a group of nodes on the left, the plan steps that compute them on the right, and
        lines between the two.
        """
        top = step_y = self.y
        step_boxes = []
        for step in steps:
            step_boxes.append(self.step(step, step_y))
            step_y = step_boxes[-1].bottom + _GAP
        for node in nodes:
            words = [f"{node.name}: {node.op} > {node_value(node)}"]
            words += map(node_weight, node.weights)
            box = boxes[node.name] = self.box(words, _LEFT, self.y, _NODE_WIDTH, "node")
            self.nodes.append(box)
            self.y = box.bottom + _GAP
        right = _LEFT + _NODE_WIDTH + 12
        if nodes:
            bottom = self.y - _GAP
            self.path(f"M {right - 6} {top} H {right} V {bottom} H {right - 6}", "does")
            for box in step_boxes:
                self.path(f"M {right} {(top + bottom) // 2} L {box.left} {box.middle}", "does")
        self.y = max(self.y, step_y)

    def step(self, step: StepFacts, top: int) -> _Box:
        words = step_caption(step, self.report)
        box = self.box(words, _STEP_LEFT, top, _STEP_WIDTH, "step")
        share = next((each.share for each in self.report.kinds if each.label == step.label), None)
        if share is not None:
            width = max(1, round(share * box.width))
            self.rect(_Box(box.left, box.bottom - 3, width, 3), "share", self.front)
        return box

    def box(self, words: list[str], left: int, top: int, width: int, kind: str) -> _Box:
        box = _Box(left, top, width, len(words) * _LINE + 2 * _PAD)
        self.rect(box, kind, self.front)
        for index, line in enumerate(words):
            self.text(line, left + _PAD, top + _PAD + index * _LINE)
        return box

    def edge(self, source: _Box, target: _Box) -> None:
        """Draw an arrow between two boxes: straight to the next box, or a curve on the left to a
        box farther down.
        """
        if self.nodes.index(target) == self.nodes.index(source) + 1:
            x = source.left + source.width // 2
            self.path(f"M {x} {source.bottom} V {target.top}", "edge")
            return
        bend = source.left - min(_BEND_MOST, 20 + round(_BEND * (target.top - source.bottom)))
        start, end = source.middle + 4, target.middle - 4
        self.path(
            f"M {source.left} {start} C {bend} {start} {bend} {end} {target.left} {end}", "edge"
        )

    def rect(self, box: _Box, kind: str, layer: ElementTree.Element | None = None) -> None:
        places = {"x": box.left, "y": box.top, "width": box.width, "height": box.height, "rx": 3}
        attributes = {key: str(value) for key, value in places.items()}
        parent = self.back if layer is None else layer
        ElementTree.SubElement(parent, "rect", attributes | {"class": kind})

    def path(self, data: str, kind: str) -> None:
        ElementTree.SubElement(self.back, "path", {"d": data, "class": kind})

    def text(self, words: str, x: int, y: int, kind: str = "") -> None:
        place = {"x": str(x), "y": str(y + _LINE - 4)} | ({"class": kind} if kind else {})
        ElementTree.SubElement(self.front, "text", place).text = words


def graph_svg(report: Report) -> str:
    drawing = _Drawing(report)
    for line in header(report):
        drawing.text(line, _PAD + 4, drawing.y, "title")
        drawing.y += _LINE
    drawing.y += _GAP
    for section in fold(report):
        drawing.section(section)
    size = {"width": str(_WIDTH), "height": str(drawing.y)}
    box = {"viewBox": f"0 0 {_WIDTH} {drawing.y}", "xmlns": "http://www.w3.org/2000/svg"}
    root = ElementTree.Element("svg", size | box)
    ElementTree.SubElement(root, "style").text = _STYLE
    marker = {"id": "tip", "viewBox": "0 0 8 8", "refX": "8", "refY": "4", "orient": "auto"}
    tip = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"),
        "marker",
        marker | {"markerWidth": "7", "markerHeight": "7"},
    )
    ElementTree.SubElement(tip, "path", {"d": "M 0 0 L 8 4 L 0 8 z", "fill": "#555"})
    paper = {"width": "100%", "height": "100%", "fill": "#fff"}
    ElementTree.SubElement(root, "rect", paper)
    root.extend((drawing.back, drawing.front))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")


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


def _section(number: int, section: GraphSection, report: Report) -> Iterator[str]:
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


def _edges(number: int, section: GraphSection, last: str | None) -> Iterator[str]:
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
    r"""Join the lines into one quoted Graphviz string, in which \l ends a left-aligned line."""
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    if len(escaped) == 1:
        return f'"{escaped[0]}"'
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"'


FORMS: dict[str, Callable[[Report], str]] = {
    "text": graph_text,
    "json": lambda report: json.dumps(report.as_json(), indent=2),
    "dot": graph_dot,
    "svg": graph_svg,
}


def write_graph(report: Report, form: str, output: Path | None) -> None:
    """Write the graph to the file `output`, or to standard output if None."""
    text = FORMS[form](report)
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
