"""Teaches a served model twelve made-up facts, and asks for them in other words.

    python run.py --url http://127.0.0.1:8000/v1 --model smollm2-135m-instruct

Uses OpenAI's client for the job, and `engine eval` to compare the tuned model with its base.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent
POLL_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--epochs", type=int, default=None, help="default: by the file's size")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("LLM_ENGINE_API_KEY", "none"))
    tuned = train(client, args.model, args.epochs)
    evaluate(args.url, [args.model, tuned])


def train(client: OpenAI, model: str, epochs: int | None) -> str:
    """Run the job to its end, and return the name of the tuned model."""
    with (HERE / "facts.jsonl").open("rb") as content:
        file = client.files.create(file=content, purpose="fine-tune")
    settings = {"n_epochs": epochs or "auto"}
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        suffix="facts",
        method={"type": "supervised", "supervised": {"hyperparameters": settings}},
    )
    print(f"job {job.id}")
    began, losses = time.monotonic(), {}
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(POLL_S)
        job = client.fine_tuning.jobs.retrieve(job.id)
        for event in client.fine_tuning.jobs.list_events(job.id, limit=50).data:
            if event.type == "metrics":
                losses[event.data["step"]] = event.data["train_loss"]
        if losses:
            step = max(losses)
            print(f"\rstep {step}, loss {losses[step]:.3f}   ", end="", flush=True)
    print(f"\n{job.status} after {time.monotonic() - began:.0f} s")
    if job.fine_tuned_model is None:
        sys.exit(job.error.message if job.error else job.status)
    draw(list(losses.values()))
    return job.fine_tuned_model


def draw(losses: list[float]) -> None:
    """The loss of each tenth of the job, as bars."""
    tenth = max(1, len(losses) // 10)
    means = [sum(part) / len(part) for part in _parts(losses, tenth)]
    for number, mean in enumerate(means):
        print(f"{number * tenth:5d} {mean:7.3f} {'#' * round(50 * mean / max(means))}")


def _parts(losses: list[float], size: int) -> list[list[float]]:
    return [losses[start : start + size] for start in range(0, len(losses), size)]


def evaluate(url: str, models: list[str]) -> None:
    command = ["engine", "eval", str(HERE / "held_back.jsonl"), "--url", url]
    options = ["--models", ",".join(models), "--max-tokens", "32", "--show", "0"]
    subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    main()
