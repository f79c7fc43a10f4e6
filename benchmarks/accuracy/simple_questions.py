"""Are the first answers right? Twenty simple questions with the sampling that `engine run`,
`engine chat` and the web page use, with three seeds each, beside greedy.

    python -m benchmarks.accuracy.simple_questions [--sampling '{"temperature": 0.7}']

It ends with 1 if a seed has fewer right answers than greedy, less one.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from engine import LLM
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.sampling_params import make_params

SEEDS = (1, 2, 3)
MAX_TOKENS = 32
# Question -> what a right answer matches. A model of 135 million parameters knows most of them.
QUESTIONS = {
    "How many days are in a week?": r"\b(7|seven)\b(?! calendar months)",
    "What is the capital of France?": r"\bParis\b",
    "What is the capital of Japan?": r"\bTokyo\b",
    "What is the capital of Italy?": r"\bRome\b",
    "How many months are in a year?": r"\b(12|twelve) (calendar )?months",
    "How many hours are in a day?": r"\b(24|twenty-four)\b",
    "How many legs does a spider have?": r"\b(8|eight)\b",
    "What is 2 + 2?": r"(?<![\d.])4\b|\bfour\b",
    "What color is the sky on a clear day?": r"\bblue\b",
    "What color is grass?": r"\bgreen\b",
    "Which planet is the largest in our solar system?": r"\bJupiter\b(?!.*actually)",
    "Which planet do we live on?": r"(?<!similar to )\bEarth\b",
    "What is the opposite of hot?": r"\bcold\b",
    "What is the chemical formula of water?": r"H2O|H₂O",
    "Who wrote Romeo and Juliet?": r"Shakespeare",
    "What is the largest ocean?": r"\bPacific\b",
    "What language do people speak in Spain?": r"\bSpanish\b",
    "What do bees make?": r"\bhoney\b",
    "What is frozen water called?": r"\bice\b",
    "Which animal says meow?": r"\bcats?\b|\bkitten",
}


def right(llm: LLM, params: Mapping[str, Any], *, shows: bool) -> list[bool]:
    sampling = make_params({**params, "max_tokens": MAX_TOKENS})
    asked = [[{"role": "user", "content": each}] for each in QUESTIONS]
    answers = [each.outputs[0].text for each in llm.chat(asked, sampling, use_tqdm=False)]
    found = [
        re.search(pattern, answer, re.IGNORECASE) is not None
        for pattern, answer in zip(QUESTIONS.values(), answers, strict=True)
    ]
    if shows:
        for question, answer, is_right in zip(QUESTIONS, answers, found, strict=True):
            print(f"{'right' if is_right else 'WRONG'}  {question}  {' '.join(answer.split())}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--sampling", type=json.loads, action="append", help="JSON, instead of what chats use"
    )
    parser.add_argument("--answers", action="store_true", help="print them")
    given = parser.parse_args()
    with LLM(given.model, max_model_len=1024) as llm:
        greedy = sum(right(llm, {"temperature": 0.0}, shows=given.answers))
        print(f"greedy: {greedy} of {len(QUESTIONS)} right")
        is_good = True
        for sampling in given.sampling or [llm.card.chat_sampling]:
            counts = [
                sum(right(llm, {**sampling, "seed": seed}, shows=given.answers)) for seed in SEEDS
            ]
            print(f"{sampling}: {', '.join(map(str, counts))} right", flush=True)
            is_good = is_good and min(counts) >= greedy - 1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
