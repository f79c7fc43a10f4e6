"""Where a report of `engine inspect --graph` goes, and in which form."""

import json
from collections.abc import Callable
from pathlib import Path

from engine.cli.graph_dot import graph_dot
from engine.cli.graph_facts import Report
from engine.cli.graph_svg import graph_svg
from engine.cli.graph_text import graph_text
from engine.core.errors import ConfigError

FORMS: dict[str, Callable[[Report], str]] = {
    "text": graph_text,
    "json": lambda report: json.dumps(report.as_json(), indent=2),
    "dot": graph_dot,
    "svg": graph_svg,
}


def write_graph(report: Report, form: str, output: Path | None) -> None:
    """To the file, or to standard output."""
    text = FORMS[form](report)
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
