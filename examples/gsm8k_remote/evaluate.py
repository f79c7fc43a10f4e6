"""Grade-school mathematics through any backend of the engine: how many answers are right?

    python evaluate.py --backend native --model smollm2-135m-instruct
    python evaluate.py --backend http://127.0.0.1:8000/v1 --data gsm8k_test.jsonl --concurrency 16
    python evaluate.py --backend vllm --model Qwen/Qwen3-8B -o vllm.python=/opt/vllm/bin/python

A line of --data is {"question": ..., "answer": ...}; an answer ends in `#### NUMBER` or is the
number. Results go to --output as they come; run it again to go on where it ended.
"""

import argparse
import asyncio
import json
import secrets
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import TextIO

from results import Result, open_results, read_results, write_result
from scoring import marked_number, predicted_number

from engine.backends.base import InferenceBackend
from engine.backends.factory import make_backend
from engine.compare.answers import ComparedAnswer
from engine.compare.contenders import find_contenders
from engine.compare.prompts import ComparedPrompt
from engine.core.errors import EngineError
from engine.core.interfaces.backend import GenerationContext
from engine.core.interfaces.request import SamplingParams

SAMPLE = Path(__file__).parent / "sample.jsonl"
INSTRUCTION = "Solve the problem step by step. End with a last line of the form: #### NUMBER"
Question = tuple[str, Decimal]


def main() -> None:
    args = parse_args()
    questions = read_questions(args.data)[: args.limit]
    try:
        sys.exit(asyncio.run(evaluate(args, questions)))
    except EngineError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="native", help="a kind, NAME=KIND, or an address")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME.OPTION=VALUE")
    parser.add_argument("--data", type=Path, default=SAMPLE, help="default: 20 questions of ours")
    parser.add_argument("--output", type=Path, default=Path("gsm8k_results.jsonl"))
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer")
    return parser.parse_args()


def read_questions(path: Path) -> list[Question]:
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"error: {path} can't be read: {error.strerror}")
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            expected = predicted_number(str(value["answer"]))
            question = str(value["question"])
        except (ValueError, KeyError, TypeError):
            sys.exit(f"error: {path}, line {number}: give question and answer, as JSON")
        if expected is None:
            sys.exit(f"error: {path}, line {number}: the answer has no number")
        questions.append((question, expected))
    return questions


async def evaluate(args: argparse.Namespace, questions: list[Question]) -> int:
    (contender,) = find_contenders([args.backend], args.option, args.model, {})
    backend = make_backend(contender.kind, contender.model, contender.options)
    print(f"starting {contender.name} ...", file=sys.stderr)
    try:
        await backend.start()
        card = backend.models()[0]
        run = f"{contender.kind}, {card.id}, {args.max_tokens} tokens"
        done = read_results(args.output, run)
        todo = [each for each in questions if each[0] not in done]
        with open_results(args.output, done) as file:
            asker = Asker(backend, "chat" in card.capabilities, run, args, file)
            await asker.ask_all(todo)
    finally:
        await backend.stop()
    wanted = {question for question, _ in questions}
    results = [each for each in (done | asker.results).values() if each.question in wanted]
    report(card.id, results, asker)
    return 1 if asker.errors else 0


class Asker:
    """Asks the questions that are left, so many at a time, and writes each result down."""

    def __init__(
        self,
        backend: InferenceBackend,
        is_chat: bool,
        run: str,
        args: argparse.Namespace,
        file: TextIO,
    ) -> None:
        self.results: dict[str, Result] = {}
        self.errors: list[str] = []
        self.elapsed_s = 0.0
        self._backend = backend
        self._is_chat = is_chat
        self._run = run
        self._args = args
        self._file = file
        self._free = asyncio.Semaphore(args.concurrency)

    async def ask_all(self, questions: list[Question]) -> None:
        began = time.monotonic()
        await asyncio.gather(*(self._ask(*question) for question in questions))
        self.elapsed_s = time.monotonic() - began

    async def _ask(self, question: str, expected: Decimal) -> None:
        async with self._free:
            try:
                answer = await self._answer(question)
            except (EngineError, TimeoutError) as error:
                self.errors.append(str(error) or "no end in time")
                return
        predicted = predicted_number(answer.said)
        result = Result(
            run=self._run,
            question=question,
            expected=str(expected),
            predicted=None if predicted is None else str(predicted),
            is_correct=predicted == expected,
            has_form=marked_number(answer.said) is not None,
            num_tokens=answer.num_tokens,
            answer=answer.said,
        )
        self.results[question] = result
        write_result(self._file, result)
        print("." if result.is_correct else "x", end="", file=sys.stderr, flush=True)

    async def _answer(self, question: str) -> ComparedAnswer:
        text = f"{INSTRUCTION}\n\n{question}"
        chat = ({"role": "user", "content": text},)
        prompt = ComparedPrompt("", chat if self._is_chat else f"{text}\n\nSolution:")
        context = GenerationContext(
            request_id=f"gsm8k-{secrets.token_hex(8)}",
            params=SamplingParams(max_tokens=self._args.max_tokens, temperature=0.0),
            timeout_s=self._args.timeout,
        )
        answer = ComparedAnswer()
        async with asyncio.timeout(self._args.timeout):
            async for event in prompt.ask(self._backend, context):
                answer.add(event)
        return answer


def report(model: str, results: list[Result], asker: Asker) -> None:
    num_right = sum(each.is_correct for each in results)
    num_formed = sum(each.has_form for each in results)
    total = len(results)
    print(file=sys.stderr)
    if total:
        print(f"{model}: {num_right} of {total} right ({num_right / total:.1%})")
        print(f"in the form asked for: {num_formed} of {total}")
    if asker.results:
        num_tokens = sum(each.num_tokens for each in asker.results.values())
        rate = num_tokens / asker.elapsed_s
        print(f"this run: {len(asker.results)} answers, {rate:.1f} tokens/s")
    for error in sorted(set(asker.errors))[:3]:
        print(f"error ({asker.errors.count(error)} times): {error}")
    if asker.errors:
        print("run it again to ask those questions anew")


if __name__ == "__main__":
    main()
