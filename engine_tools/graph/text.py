"""Formats the graph and the plan as aligned text. The captions of plan steps are also here; the
drawings use them too.
"""

from collections.abc import Iterator, Sequence

from engine.cli.model_report import human_bytes
from engine_tools.graph.facts import GraphSection, NodeFacts, Report, StepFacts, WeightFacts, fold

_UNKNOWN = "not built"
# On an idle machine, the times of the plan steps add up to at least this share of the time of a
# forward pass.
_QUIET = 0.8


def graph_text(report: Report) -> str:
    sections = fold(report)
    lines = [*header(report), "", *_graph(report, sections), "", *_plan(report, sections)]
    lines += ["", *_memory(report)]
    if report.kinds:
        lines += ["", *_times(report)]
    return "\n".join(lines)


def header(report: Report) -> list[str]:
    """Lines that name the model, the size of the step and the machine."""
    step, threads = report.step, _count(report.threads, "thread")
    if step.is_prompt:
        what = f"{_count(step.tokens, 'token')} of a prompt of {step.context:,}"
    else:
        sequences = _count(report.sequences, "sequence")
        what = f"{_count(step.tokens, 'generated token')}, {sequences} of {step.context:,}"
    kernels = f"{report.instruction_set} kernels"
    if report.instruction_set is None:
        kernels = "kernels not built: what they would read is taken from the file"
    return [
        f"{report.path}: {report.family}, {_count(report.layers, 'layer')}",
        f"One step: {what}; {threads}, {kernels}, cache in {report.kv_type}",
    ]


def node_weight(weight: WeightFacts) -> str:
    return f"{weight.name} {weight.type} [{', '.join(map(str, weight.shape))}]"


def node_value(node: NodeFacts) -> str:
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


def step_kernel(step: StepFacts, report: Report) -> str:
    """The instruction set, then the number formats for decode and for prefill, for example "amx
    int8 | bf16".
    """
    if report.instruction_set is None:
        return _UNKNOWN
    if step.generated == step.prompt:
        return f"{report.instruction_set} {step.generated}"
    return f"{report.instruction_set} {step.generated} | {step.prompt}"


def step_weights(step: StepFacts) -> str:
    """The storage types of the plan step's weights, largest first, then the layout that the kernels
    read, for example "Q4_1 + F32 > Q4".
    """
    sizes: dict[str, int] = {}
    for weight in step.weights:
        sizes[weight.type] = sizes.get(weight.type, 0) + weight.bytes
    types = " + ".join(sorted(sizes, key=lambda kind: -sizes[kind]))
    return f"{types} > {step.layout}" if types and step.layout else types


def step_places(step: StepFacts) -> str:
    return " > ".join(map(str, step.places))


def step_caption(step: StepFacts, report: Report) -> list[str]:
    """The description of a plan step, in three lines."""
    first = f"{step.label}: {step_kernel(step, report)}"
    weights = f"{step_weights(step)} {human_bytes(step.stored_bytes)}, " if step.weights else ""
    second = f"{weights}{step.flops / 1e6:,.2f} MFLOP, {human_bytes(step.bytes)} moved"
    third = f"places {step_places(step)}"
    if step.seconds is not None:
        rate = step.bytes / step.seconds / 1e9
        third += f", {1e3 * step.seconds:.4f} ms, {rate:.1f} GB/s"
    return [first, second, third]


def _graph(report: Report, sections: Sequence[GraphSection]) -> Iterator[str]:
    yield f"GRAPH  {_count(len(report.nodes), 'node')}; T tokens, R wanted logits"
    rows: list[list[str]] = [["node", "op", "reads", "weights", "makes"]]
    for section in sections:
        if section.layers:
            rows.append([section.title])
        indent = "  " if section.layers else ""
        for node in section.nodes:
            weights = ", ".join(map(node_weight, node.weights))
            reads = ", ".join(node.inputs)
            rows.append([indent + node.name, node.op, reads, weights, node_value(node)])
    yield from _aligned(rows)
    yield f"gives {', '.join(report.outputs)}"


def _plan(report: Report, sections: Sequence[GraphSection]) -> Iterator[str]:
    room = report.capacity
    yield (
        f"PLAN  {_count(len(report.steps), 'step')}, for up to {_count(room.tokens, 'token')} and "
        f"{_count(room.logits, 'row')} of logits"
    )
    yield "arithmetic: generated tokens | prompts;  weights: in the file > as kernels read them"
    timed = bool(report.kinds)
    columns = ["step", "arithmetic", "weights", "stored", "MFLOP", "moved", "places", "claim"]
    rows: list[list[str]] = [[*columns, *(["ms"] if timed else [])]]
    for section in sections:
        if section.layers:
            rows.append([section.title + (", each:" if len(section.layers) > 1 else "")])
        indent = "  " if section.layers else ""
        for step in section.steps:
            label, *cells = _step_row(step, report)
            rows.append([indent + label, *cells])
            rows.append([f"{indent}  = {' + '.join(step.nodes)}"])
    yield from _aligned(rows, right=range(3, 9))
    totals = report.totals
    yield (
        f"all steps: {totals['flops'] / 1e6:,.2f} MFLOP; moved {human_bytes(totals['bytes'])}: "
        f"weights {human_bytes(totals['weight_bytes'])}, "
        f"activations {human_bytes(totals['activation_bytes'])}, "
        f"keys and values {human_bytes(totals['kv_bytes'])}"
    )
    yield f"weights in the file: {human_bytes(totals['stored_bytes'])}, each counted once"


def _step_row(step: StepFacts, report: Report) -> list[str]:
    row = [
        step.label,
        step_kernel(step, report),
        step_weights(step),
        human_bytes(step.stored_bytes) if step.weights else "",
        f"{step.flops / 1e6:,.2f}",
        human_bytes(step.bytes),
        step_places(step),
        "" if step.split is None else f"{step.split.grain} of {step.split.units:,}",
    ]
    return row if step.seconds is None else [*row, f"{1e3 * step.seconds:.4f}"]


def _memory(report: Report) -> Iterator[str]:
    yield "MEMORY  buffers share places of one arena"
    for number, place in enumerate(report.places):
        room = human_bytes(place.bytes)
        yield f"  place {number}: {place.floats:,} floats per {place.per}, {room}"
    most = f"{human_bytes(report.capacity_bytes)} when the plan is full"
    yield f"  peak: {human_bytes(report.arena_bytes)} for this step, {most}"


def _times(report: Report) -> Iterator[str]:
    assert report.forward_seconds is not None
    yield f"TIME  medians of {report.forwards} forwards, the quicker half of all"
    rows = [["step", "count", "ms", "share", "GB/s", "GFLOP/s"]]
    for kind in report.kinds:
        rates = f"{kind.gb_per_s:.2f}", f"{kind.gflop_per_s:.2f}"
        share = f"{100 * kind.share:.1f} %"
        rows.append([kind.label, str(kind.steps), f"{1e3 * kind.seconds:.3f}", share, *rates])
    seconds = sum(kind.seconds for kind in report.kinds)
    rows.append(
        [
            "all steps",
            str(len(report.steps)),
            f"{1e3 * seconds:.3f}",
            "100.0 %",
            f"{report.totals['bytes'] / seconds / 1e9:.2f}",
            f"{report.totals['flops'] / seconds / 1e9:.2f}",
        ]
    )
    yield from _aligned(rows, right=range(1, 6))
    rate = report.step.tokens / report.forward_seconds
    yield f"a forward: {1e3 * report.forward_seconds:.3f} ms, {rate:,.1f} tokens/s without sampling"
    if seconds < _QUIET * report.forward_seconds:
        yield (
            f"the steps' medians make up {seconds / report.forward_seconds:.0%} of it: other work "
            "had the cores meanwhile; time again when the machine is idle"
        )


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Align the columns of a table. A row with a single cell is a heading: it is not aligned."""
    table = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in rows:
        if len(row) == 1:
            yield f"  {row[0]}"
            continue
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(cells).rstrip()


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
