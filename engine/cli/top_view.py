"""A frame of `engine top`, for people and as JSON. What a server says is text, never markup."""

import dataclasses
from typing import TYPE_CHECKING, Any

from engine.cli.top_data import BackendRow, Frame

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_STATES = {"ready": "green", "loading": "yellow", "ejected": "bold yellow", "down": "bold red"}
_MAX_DECISIONS = 8


def as_json(frame: Frame) -> dict[str, Any]:
    return dataclasses.asdict(frame)


def as_view(frame: Frame, note: str = "") -> "Group":
    """`note` is what the reader should know besides, such as how to leave."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_headline(frame), _backends(frame)]
    details = [row for row in frame.backends if row.state != "ready" and row.detail]
    parts += [
        Text(plain(f"{row.model} on {row.name}: {row.detail}"), style="yellow") for row in details
    ]
    if frame.decisions:
        parts.append(_decisions(frame))
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def _headline(frame: Frame) -> "Text":
    from rich.text import Text

    text = Text(plain(frame.url), style="bold", no_wrap=True, overflow="ellipsis")
    text.append(f"  {plain(frame.status)}", "green" if frame.status == "healthy" else "bold red")
    figures = [
        f"{frame.in_flight} in flight",
        f"{frame.requests_per_s:.1f} req/s",
        f"{frame.tokens_per_s:.0f} tok/s",
    ]
    if frame.uptime_s is not None:
        figures.insert(0, f"up {_duration(frame.uptime_s)}")
    if frame.memory_mb is not None:
        figures.append(f"{frame.memory_mb:,.0f} MB")
    return text.append("  " + "  ".join(figures), "not bold default")


def _backends(frame: Frame) -> "Table":
    """A line for each model, and below it one for each of its backends."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    table.add_column("model, backend", overflow="fold", ratio=1)
    table.add_column("state")
    for heading in ("busy", "req/s", "tok/s", "TTFT", "cache", "fail", "restarts"):
        table.add_column(heading, justify="right")
    model = None
    for row in frame.backends:
        if row.model != model:
            table.add_row(Text(plain(row.model), style="bold"))
        model = row.model
        table.add_row(
            Text(f"  {_name(row)}"),
            Text(plain(row.state), style=_STATES.get(row.state, "")),
            str(row.in_flight) + (f"/{row.max_concurrent}" if row.max_concurrent else ""),
            f"{row.requests_per_s:.1f}",
            f"{row.tokens_per_s:.0f}",
            "-" if row.ttft_p50_s is None else f"{row.ttft_p50_s * 1000:.0f} ms",
            "-" if row.cache_hit_rate is None else f"{row.cache_hit_rate:.0%}",
            Text(str(row.failures), style="red" if row.failures else ""),
            Text(str(row.restarts), style="yellow" if row.restarts else ""),
        )
    return table


def _name(row: BackendRow) -> str:
    name = plain(row.name)
    return name if not row.kind or row.kind == row.name else f"{name} ({plain(row.kind)})"


def _decisions(frame: Frame) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    table.add_column("last decisions", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("model", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("went to", no_wrap=True, ratio=2)
    table.add_column("why", overflow="ellipsis", no_wrap=True, ratio=5)
    for each in frame.decisions[:_MAX_DECISIONS]:
        attempts = each.get("attempts") or 1
        chosen = plain(str(each.get("chosen") or "nobody"))
        table.add_row(
            Text(plain(str(each.get("request_id", "")))),
            Text(plain(str(each.get("model", "")))),
            Text(f"{chosen}, attempt {attempts}" if attempts > 1 else chosen),
            Text(plain(f"{each.get('policy', '')}: {each.get('why', '')}")),
        )
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def plain(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)
