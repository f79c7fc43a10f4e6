"""`engine finetune`: trains a LoRA adapter on this machine, with a progress bar and a loss curve.

The adapter is added to the store, so that servers of its base model serve it. Ctrl-C pauses the
job; `--resume` continues it. The exit status is 1 if the job failed or was paused.
"""

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.cli.console import messages
from engine.cli.convert import path_of
from engine.core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from rich.progress import Progress

    from engine.finetuning.folder import JobFolder, TrainingEvent
    from engine.finetuning.plan import TrainingPlan
    from engine.finetuning.process import TrainerProcess

NAME_FILE = "name"  # in the job's folder: the model id of the adapter
POLL_S = 0.2
CURVE_ROWS, CURVE_COLUMNS = 8, 60


def finetune(
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="JSON lines: the training file.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", "--model", "-m", metavar="MODEL", help="The model: a name, file or folder."
        ),
    ] = None,
    suffix: Annotated[str, typer.Option(help="Part of the name: ft:BASE:SUFFIX:ID.")] = "tuned",
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its loss is shown after each epoch.")
    ] = None,
    method: Annotated[
        Literal["supervised", "dpo"],
        typer.Option(help="Train on answers, or on preferences (DPO)."),
    ] = "supervised",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Default: by the number of lines.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples per step. Default: by the number of lines.")
    ] = None,
    learning_rate_multiplier: Annotated[
        float, typer.Option(help="Times the usual learning rate: 0.001, or 0.0001 for DPO.")
    ] = 1.0,
    rank: Annotated[
        int, typer.Option(min=1, help="Of the adapter. A higher one learns more and is larger.")
    ] = 16,
    alpha: Annotated[
        float | None, typer.Option(help="Scale of the adapter. Default: twice the rank.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same adapter.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or cuda:N.")] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder for the job. Default: in the data folder."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the job of this folder.")
    ] = None,
) -> None:
    """Train a LoRA adapter on the examples of a file, and serve it with its base model.

    A line is a conversation (`messages`), a `prompt` with its `completion`, or for --method dpo an
    `input` with `preferred_output` and `non_preferred_output`, as OpenAI's files have them.
    """
    from engine.finetuning.folder import JobFolder
    from engine.finetuning.jobs import TrainingRequest, make_job
    from engine.finetuning.plan import Hyperparameters, LoraShape, check_suffix

    if resume is not None:
        folder, plan = JobFolder(resume), _plan_of(resume)
    elif data is None or base is None:
        raise ConfigError("give DATA and --base MODEL, or --resume DIR")
    else:
        check_suffix(suffix)
        request = TrainingRequest(
            base=path_of(base),
            training_file=data,
            validation_file=validation,
            method=method,
            hyperparameters=Hyperparameters(
                n_epochs=epochs or "auto",
                batch_size=batch_size or "auto",
                learning_rate_multiplier=learning_rate_multiplier,
            ),
            lora=LoraShape(rank=rank, alpha=2.0 * rank if alpha is None else alpha),
            seed=seed,
            device=device,
        )
        folder, plan = make_job(request, output or _new_folder())
        (folder.path / NAME_FILE).write_text(_name_of(base, suffix, folder.path.name))
    _run(folder, plan)


def _run(folder: "JobFolder", plan: "TrainingPlan") -> None:
    shown = f"{plan.n_epochs} epochs, batches of {plan.batch_size}, rank {plan.lora.rank}"
    messages().print(f"training {folder.path} ({shown})", highlight=False, markup=False)
    _finish(folder, _follow(folder))


def _plan_of(path: Path) -> "TrainingPlan":
    from engine.finetuning.plan import TrainingPlan

    try:
        plan = TrainingPlan.read(path)
    except OSError:
        raise ConfigError(f"{path} is no folder of a job", param="resume") from None
    if not (path / NAME_FILE).exists():
        raise ConfigError(f"{path} is a job of a server, which continues it", param="resume")
    return plan


def _name_of(base: str, suffix: str, job: str) -> str:
    from engine.core.store.model_store import default_name
    from engine.finetuning.jobs import adapter_name

    return adapter_name(default_name(base), suffix, job.removeprefix("ftjob-")[:8])


def _new_folder() -> Path:
    from engine.core.folders import data_directory

    return data_directory() / "finetuning" / f"ftjob-{secrets.token_hex(6)}"


def _follow(folder: "JobFolder") -> "list[TrainingEvent]":
    """Run the job and show its progress. Returns all metrics."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from engine.finetuning.process import TrainerProcess

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    _, start = folder.events()
    process = TrainerProcess(folder)
    try:
        with Progress(*columns, console=messages()) as bar:
            return _watch(folder, process, bar, start)
    except KeyboardInterrupt:
        messages().print("pausing after this step ...")
        process.pause()
        while process.exit_status() is None:
            time.sleep(POLL_S)
        messages().print(f"paused; engine finetune --resume {folder.path} continues", markup=False)
        raise typer.Exit(1) from None
    finally:
        process.kill()


def _watch(
    folder: "JobFolder", process: "TrainerProcess", bar: "Progress", start: int
) -> "list[TrainingEvent]":
    from engine.finetuning.process import how_it_ended

    task = bar.add_task("loading the model", total=None)
    found: list[TrainingEvent] = []
    while True:
        status = process.exit_status()
        events, start = folder.events(start)
        for event in events:
            if event.kind == "metrics" and event.loss is not None:
                found.append(event)
                text = f"step {event.step} of {event.num_steps}, loss {event.loss:.3f}"
                bar.update(task, description=text, completed=event.step, total=event.num_steps)
            if event.kind == "notice":
                bar.console.print(event.message, markup=False, highlight=False)
            if event.kind == "failed":
                raise EngineError(event.message)
            if event.kind == "succeeded":
                return found
        if status is not None and not events:
            reason = f"the training process {how_it_ended(status)}"
            raise EngineError(f"{reason}; engine finetune --resume {folder.path} continues it")
        time.sleep(POLL_S)


def _finish(folder: "JobFolder", metrics: "list[TrainingEvent]") -> None:
    """Draw the loss and add the adapter to the store. Prints its name."""
    from engine.core.store.adapter_store import keep_adapter

    losses = [each.loss for each in metrics if each.loss is not None]
    console = messages()
    for line in loss_curve(losses, CURVE_ROWS, CURVE_COLUMNS):
        console.print(line, markup=False, highlight=False)
    for event in metrics:
        if event.validation_loss is not None:
            console.print(
                f"step {event.step}: validation loss {event.validation_loss:.3f}", highlight=False
            )
    name = (folder.path / NAME_FILE).read_text()
    base = name.removeprefix("ft:").rsplit(":", 2)[0]
    keep_adapter(name, folder.adapter, base, replaces=True)
    console.print(
        f"engine serve {base} now serves it; or: --lora {name}={folder.adapter}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    print(name)


def loss_curve(losses: list[float], rows: int, columns: int) -> list[str]:
    """A drawing of the losses, each column the mean of its share of the steps."""
    if not losses:
        return []
    columns = min(columns, len(losses))
    edges = [round(at * len(losses) / columns) for at in range(columns + 1)]
    means = [
        sum(losses[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
    ]
    top, bottom = max(means), min(means)
    step = (top - bottom) / rows or 1.0
    heights = [(mean - bottom) / step for mean in means]
    blocks = " ▁▂▃▄▅▆▇█"
    lines = []
    for row in reversed(range(rows)):
        cells = (blocks[max(0, min(8, round((height - row) * 8)))] for height in heights)
        label = f"{bottom + (row + 1) * step:8.3f} " if row in (0, rows - 1) else " " * 9
        lines.append(label + "".join(cells))
    return lines
