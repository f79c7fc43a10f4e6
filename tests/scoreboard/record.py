"""Stores measurements: failing seeds, and the page of the latest figures."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEEDS = HERE / "failing_seeds.jsonl"
LATEST = HERE / "latest.jsonl"
PAGE = HERE.parents[1] / "docs" / "scoreboard.md"

HEAD = """# Scoreboard

What the server withstands, measured. `make scoreboard` measures it again and writes this page
(`make scoreboard ARGS="R05 R06"`: a part of it). The same figures with fewer cases are part of
`make test-integration`, and so is every case that ever failed
(`tests/scoreboard/failing_seeds.jsonl`). A figure that tried no case has failed.

| | figure | value | limit | kept | cases | seconds | seed | commit |
|---|---|---|---|---|---|---|---|---|
"""


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def keep_seeds(result: dict[str, Any], *, has_case: bool) -> None:
    """Store the failing seeds of a figure whose cases can be repeated one by one."""
    known = {(each["id"], each["seed"]) for each in read_lines(SEEDS)}
    new = [seed for seed in result["failing_seeds"] if (result["id"], seed) not in known]
    if not has_case or not new:
        return
    with SEEDS.open("a") as file:
        for seed in new:
            entry = {"id": result["id"], "seed": seed, "commit": result["commit"]}
            file.write(json.dumps(entry) + "\n")


def write_page(results: list[dict[str, Any]]) -> None:
    """Update the page: new results replace older ones of the same figure."""
    latest = {each["id"]: each for each in read_lines(LATEST)}
    latest |= {each["id"]: each for each in results}
    ordered = [latest[id] for id in sorted(latest)]
    LATEST.write_text("".join(json.dumps(each) + "\n" for each in ordered))
    PAGE.write_text(HEAD + "".join(_row(each) for each in ordered) + _notes(ordered))


def _row(result: dict[str, Any]) -> str:
    names = result["limit"]
    value = ", ".join(f"{_plain(name)} {result['value'].get(name, '?')}" for name in names)
    limit = ", ".join(result["limit"].values())
    kept = (
        "yes"
        if result["pass"]
        else f"**no**: {', '.join(map(_plain, result['broken'])) or 'no case'}"
    )
    fields = (
        *(result["id"], result["name"], value, limit, kept, f"{result['cases']:,}"),
        *(result["seconds"], result["seed"], result["commit"]),
    )
    return f"| {' | '.join(map(str, fields))} |\n"


def _notes(results: list[dict[str, Any]]) -> str:
    told = [each for each in results if each["notes"]]
    if not told:
        return ""
    lines = [
        f"- {each['id']}: " + ", ".join(f"{_plain(k)} {v}" for k, v in each["notes"].items())
        for each in told
    ]
    return "\nBeside the limits:\n\n" + "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    return name.replace("_", " ")
