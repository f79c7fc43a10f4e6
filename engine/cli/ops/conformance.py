"""`engine conformance URL`: checks whether a server behaves as existing clients expect.

The table is written to standard output while the rules run. The exit status is 0 only if no rule
failed.
"""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.console import (
    SERVER_URL,
    ApiKeyFileOption,
    JsonOption,
    SameUrlOption,
    UrlArgument,
    messages,
    output,
    read_api_key,
)

if TYPE_CHECKING:
    from engine_tools.conformance.rule import RuleResult
    from engine_tools.conformance.target import Target


def conformance(
    url: UrlArgument = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that it lists.")] = None,
    api_key_file: ApiKeyFileOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="Run this group only; may be repeated."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that one request may take.")
    ] = 120.0,
    as_json: JsonOption = False,
    same_url: SameUrlOption = None,
) -> None:
    """Check an OpenAI-compatible server against what clients rely on.

    Exits with 1 if a rule is broken.
    """
    from engine_tools.conformance.report import as_json as report_json
    from engine_tools.conformance.report import as_table, counts, summary

    address = same_url or url or SERVER_URL
    target, results = asyncio.run(
        _run(address, model, read_api_key(api_key_file), only or [], timeout)
    )
    if as_json:
        print(json.dumps(report_json(target, results), indent=2))
    else:
        console = output()
        console.print(as_table(results))
        console.print(f"{target.model} at {target.client.base_url}", markup=False, highlight=False)
        console.print(summary(results))
    if counts(results)["fail"]:
        raise typer.Exit(1)


async def _run(
    url: str, model: str | None, api_key: str | None, only: list[str], timeout_s: float
) -> "tuple[Target, list[RuleResult]]":
    from engine_tools.conformance.rules import GROUPS
    from engine_tools.conformance.run import find_target, new_client, run_rules

    async with new_client(url, api_key, timeout_s) as client:
        target = await find_target(client, model)
        with messages().status("") as status:
            results = await run_rules(
                target, GROUPS, only, lambda result: status.update(result.rule.title)
            )
    return target, results
