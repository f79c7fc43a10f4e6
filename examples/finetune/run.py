"""Teaches a served model twelve made-up facts, and asks for them in other words. With
--preferences, it teaches the model to prefer short answers to wordy ones instead.

    python run.py --url http://127.0.0.1:8080/v1 --model smollm2-135m-instruct

Uses OpenAI's client for the job, and `engine eval` to compare the tuned model with its base.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

HERE = Path(__file__).parent
POLL_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--epochs", type=int, default=None, help="default: by the file's size")
    parser.add_argument("--preferences", action="store_true", help="train by DPO")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("LLM_ENGINE_API_KEY", "none"))
    settings = {"hyperparameters": {"n_epochs": args.epochs or "auto"}}
    if args.preferences:
        files = {
            "training_file": upload(client, "preferences.jsonl"),
            "validation_file": upload(client, "preferences_held_back.jsonl"),
        }
        job = train(client, args.model, {"type": "dpo", "dpo": settings}, suffix="short", **files)
        show_margins(client, job)
    else:
        file = upload(client, "facts.jsonl")
        method = {"type": "supervised", "supervised": settings}
        job = train(client, args.model, method, suffix="facts", training_file=file)
        evaluate(args.url, [args.model, job.fine_tuned_model])


def upload(client: OpenAI, name: str) -> str:
    with (HERE / name).open("rb") as content:
        return client.files.create(file=content, purpose="fine-tune").id


def train(client: OpenAI, model: str, method: dict[str, Any], **given: str) -> Any:
    """Run a job to its end. Returns the job."""
    job = client.fine_tuning.jobs.create(model=model, method=method, **given)  # type: ignore[arg-type]
    print(f"job {job.id}")
    began, losses, step = time.monotonic(), {}, 0
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(POLL_S)
        job = client.fine_tuning.jobs.retrieve(job.id)
        for event in client.fine_tuning.jobs.list_events(job.id, limit=50).data:
            if event.type == "metrics":
                losses[event.data["step"]] = event.data["train_loss"]
        if losses and max(losses) > step:
            step = max(losses)
            print(f"\rstep {step}, loss {losses[step]:.3f}   ", end="", flush=True)
    print(f"\n{job.status} after {time.monotonic() - began:.0f} s")
    if job.fine_tuned_model is None:
        sys.exit(job.error.message if job.error else job.status)
    draw([losses[step] for step in sorted(losses)])
    return job


def draw(losses: list[float]) -> None:
    """The loss of each tenth of the job, as bars."""
    tenth = max(1, len(losses) // 10)
    means = [sum(part) / len(part) for part in _parts(losses, tenth)]
    for number, mean in enumerate(means):
        print(f"{number * tenth:5d} {mean:7.3f} {'#' * round(50 * mean / max(means))}")


def _parts(losses: list[float], size: int) -> list[list[float]]:
    return [losses[start : start + size] for start in range(0, len(losses), size)]


def show_margins(client: OpenAI, job: Any) -> None:
    """How much more the model likes the preferred answers to questions that it was not trained on,
    after each epoch. This is in the result file of the job.
    """
    text = client.files.content(job.result_files[0]).text
    rows = [row for row in csv.DictReader(text.splitlines()) if row["valid_reward_margin"]]
    for row in rows:
        accuracy = float(row["valid_reward_accuracy"])
        margin = float(row["valid_reward_margin"])
        print(f"step {row['step']}: held-back pairs: margin {margin:+.3f}, {accuracy:.0%} right")
    question = "What is the capital of Norway?"
    for model in (job.model, job.fine_tuned_model):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=60,
        )
        print(f"{model}: {answer.choices[0].message.content}")


def evaluate(url: str, models: list[str]) -> None:
    command = ["engine", "eval", str(HERE / "held_back.jsonl"), "--url", url]
    options = ["--models", ",".join(models), "--max-tokens", "32", "--show", "0"]
    subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    main()
