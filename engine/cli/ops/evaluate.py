"""`engine eval`: asks models the questions of a file, and shows which answers are right.

The exit status is 0 if every question was answered, right or wrong. It is 1 if some could not be
asked, and 2 if the command line or the file is wrong.
"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.cli.compare import OptionOption
from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, messages, output
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.config_schema import Settings
    from engine_tools.compare.contenders import Contender
    from engine_tools.evaluation.items import Item
    from engine_tools.evaluation.run import EvaluatedModel, EvaluationPlan


def evaluate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines: a question and its check each.")
    ],
    models: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Models, names of [backends] or addresses; NAME=URL names one."
            " Default: the settings' model.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask the models of this server; --models are its names for them."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="The model that decides on questions with criteria.")
    ] = None,
    check: Annotated[
        Literal["exact", "contains", "number"] | None,
        typer.Option(help="How answers are compared where a line does not say. Default: exact."),
    ] = None,
    instruction: Annotated[str, typer.Option(help="Text before each question.")] = "",
    option: OptionOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only so many questions.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=65536, help="Per answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Questions at once.")] = 8,
    timeout: Annotated[
        float, typer.Option(min=1, max=86400, help="Seconds for one question.")
    ] = 300.0,
    out: Annotated[
        Path | None,
        typer.Option("--output", help="Write answers here; the same command resumes from it."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Wrong answers to show.")] = 5,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask models the questions of a file and count the right answers.

    A line has `question` (or `messages`) and one of: `answer`, `choices` with `answer`, `schema`,
    or `criteria` for a judge. The first of --models is what the others are compared with.
    """
    from engine_tools.evaluation.items import read_items
    from engine_tools.evaluation.run import EvaluationPlan

    settings = load_cli_settings(config).settings
    items = read_items(file, check)[:limit]
    contenders = _contenders((models or "").split(","), url, option or [], settings)
    judges = _contenders([judge], url, [], settings) if judge else [None]
    plan = EvaluationPlan(items, max_tokens, concurrency, timeout, instruction, judge or "")
    found = _run(contenders, judges[0], plan, out)
    _show(found, items, show, as_json)
    if any(each.errors for each in found):
        raise typer.Exit(1)


def _run(
    contenders: "list[Contender]",
    judge: "Contender | None",
    plan: "EvaluationPlan",
    out: Path | None,
) -> "list[EvaluatedModel]":
    from engine_tools.evaluation.results import ResultFile
    from engine_tools.evaluation.run import evaluate

    results = ResultFile(out, plan.settings)
    try:
        with messages().status("") as status:
            return asyncio.run(evaluate(contenders, judge, plan, results, status.update))
    finally:
        results.close()


def _contenders(
    words: list[str], url: str | None, options: list[str], settings: "Settings"
) -> "list[Contender]":
    """A word that `engine compare` does not know is the name of a model."""
    from engine.backends.custom.engine_settings import default_backend
    from engine_tools.compare.contenders import URL_KIND, Contender, find_contenders

    named = [word.strip() for word in words if word.strip()] or [settings.model.model_path]
    known = {
        name: Contender(name, table.kind, table.model, table.options)
        for name, table in settings.tables.backends.items()
    }
    for word in named:
        if url is not None:
            known[word] = Contender(word, URL_KIND, word, {"base_url": url})
        elif word not in known and "://" not in word:
            own = settings.model
            is_open = own.backend == "auto"
            kind = default_backend(own.device, own.dtype) if is_open else own.backend
            known[word] = Contender(word, kind, word, {})
    if len(set(named)) < len(named):
        raise ConfigError("--models names a model twice", param="models")
    return find_contenders(named, options, settings.model.model_path, known)


def _show(found: "list[EvaluatedModel]", items: "list[Item]", show: int, as_json: bool) -> None:
    from engine_tools.evaluation import report

    if as_json:
        print(json.dumps(report.as_json(found), indent=2))
        return
    console = output()
    console.print(report.as_table(found))
    lines = report.difference_lines(found)
    wrong = report.wrong_table(found, items, show) if show else None
    if wrong is not None:
        console.print(wrong)
    for each in found:
        for error in sorted(set(each.errors))[:3]:
            lines.append(f"{each.name}: error ({each.errors.count(error)} times): {error}")
    for line in lines:
        console.print(line, markup=False, highlight=False)
