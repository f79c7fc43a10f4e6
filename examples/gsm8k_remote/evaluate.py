"""Grade-school mathematics through any backend of the engine: how many answers are right?

    python evaluate.py                                  # our own engine, 20 questions of ours
    python evaluate.py --models http://127.0.0.1:8080/v1 --concurrency 16 --data gsm8k_test.jsonl
    python evaluate.py --models base,ft:base:maths:1 --url http://127.0.0.1:8080/v1

It is `engine eval` with the instruction and the check of this task. Other options of `engine eval`
may follow. Results go to --output as they come; run it again to go on where it ended.
"""

import argparse
import os
from pathlib import Path

SAMPLE = Path(__file__).parent / "sample.jsonl"
INSTRUCTION = "Solve the problem step by step. End with a last line of the form: #### NUMBER"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SAMPLE, help="default: 20 questions of ours")
    parser.add_argument("--output", type=Path, default=Path("gsm8k_results.jsonl"))
    args, others = parser.parse_known_args()
    task = ["--check", "number", "--instruction", INSTRUCTION, "--max-tokens", "320"]
    command = ["engine", "eval", str(args.data), "--output", str(args.output), *task, *others]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
