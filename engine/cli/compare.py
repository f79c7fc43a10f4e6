"""`engine compare`: sends the same prompts to several backends and shows the results in one table.

The exit status is 0 if every backend agrees with the first one, up to near ties, on the required
share of prompts. It is 1 if a backend does not agree or could not run, and 2 if the command line is
wrong.
"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, messages, output
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.config_schema import Settings
    from engine_tools.compare.contenders import Contender
    from engine_tools.compare.prompts import ComparedPrompt
    from engine_tools.compare.report import ComparedBackend
    from engine_tools.compare.run import CompareTrial, Plan

MIN_BACKENDS = 2
BackendsOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Backends: kinds, names of [backends] or URLs. NAME=KIND or NAME=URL gives one a name."
        " The others are compared with the first.",
    ),
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME.OPTION=VALUE",
        help="An option of one backend, its model too; may be repeated.",
    ),
]


def compare(
    backends: BackendsOption,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="Text or .jsonl: a prompt or chat per line.")
    ],
    model: Annotated[
        str | None, typer.Option(help="For backends that name none. Default: the settings'.")
    ] = None,
    option: OptionOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send texts as a user's message.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only so many prompts of the file.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=65536, help="Per answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 1,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that one request may take.")
    ] = 120.0,
    tie: Annotated[
        float,
        typer.Option(
            min=0, max=10, help="Nats between two tokens up to which they are a near tie."
        ),
    ] = 0.5,
    fail_below: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of prompts on which backends have to agree."),
    ] = 1.0,
    show: Annotated[int, typer.Option(min=0, help="Differences to show.")] = 10,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the same prompts through several backends; compare answers and speed.

    Exits with 1 if a backend agrees with the first one on less than --fail-below.
    """
    from engine_tools.compare.prompts import read_prompts
    from engine_tools.compare.report import rows_of
    from engine_tools.compare.run import Plan

    settings = load_cli_settings(config).settings
    contenders = _contenders(backends, option or [], model, settings)
    asked = read_prompts(prompts, as_chat=chat)[:limit]
    plan = Plan(asked, max_tokens, concurrency, timeout)
    rows = rows_of(asyncio.run(_run(contenders, plan)), tie)
    worst = min(row.agreement for row in rows)
    if as_json:
        _print_json(rows, asked, tie, fail_below)
    else:
        _print_tables(rows, asked, show)
        verdict = f"worst agreement {worst:.1%}, wanted {fail_below:.1%} (near tie: {tie:g} nats)"
        output().print(verdict, highlight=False)
    if worst < fail_below or any(row.trial.failure is not None for row in rows):
        raise typer.Exit(1)


def _contenders(
    words: str, options: list[str], model: str | None, settings: "Settings"
) -> "list[Contender]":
    from engine_tools.compare.contenders import Contender, find_contenders

    configured = {
        name: Contender(name, table.kind, table.model, table.options)
        for name, table in settings.tables.backends.items()
    }
    default_model = model or settings.model.model_path
    found = find_contenders(words.split(","), options, default_model, configured)
    if len(found) < MIN_BACKENDS:
        raise ConfigError("--backends needs two or more, separated by commas", param="backends")
    return found


async def _run(contenders: "list[Contender]", plan: "Plan") -> "list[CompareTrial]":
    from engine_tools.compare.run import run_all

    with messages().status("") as status:
        return await run_all(contenders, plan, lambda text: status.update(text))


def _print_json(
    rows: "list[ComparedBackend]", asked: "list[ComparedPrompt]", tie: float, fail_below: float
) -> None:
    from engine_tools.compare.report import as_json

    limits = {"tie_nats": tie, "fail_below": fail_below}
    print(json.dumps(limits | as_json(rows, asked), indent=2))


def _print_tables(rows: "list[ComparedBackend]", asked: "list[ComparedPrompt]", show: int) -> None:
    from engine_tools.compare.report import as_table, differences_table, error_lines

    console = output()
    console.print(as_table(rows))
    differences = differences_table(rows, asked, show) if show else None
    if differences is not None:
        console.print(differences)
    for line in error_lines(rows):
        console.print(line, markup=False, highlight=False)
