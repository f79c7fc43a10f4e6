"""Asks a model one question and scores its answer. Choices are scored by log-probability."""

import asyncio
import math
import secrets
from dataclasses import dataclass, field

import msgspec

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    GenerationContext,
    GrammarSpec,
    ModelCard,
    TextEvent,
    TokenText,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing.shadow.compared_answer import ComparedAnswer
from engine_tools.evaluation.items import ChoiceCheck, Item, JudgeCheck, SchemaCheck, TextCheck
from engine_tools.evaluation.schemas import json_in, satisfies
from engine_tools.evaluation.texts import contains, is_exact, marked_number, predicted_number

_VERDICT_TOKENS = 400  # more than the longest verdict
VERDICT = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 300},
        "verdict": {"enum": ["right", "wrong"]},
    },
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}
_JUDGE = (
    "You grade answers. Say in one sentence whether the answer satisfies the criteria, then give"
    " your verdict: right or wrong."
)


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer, and whether it is right by each measure. The first measure is the check's own."""

    answer: str
    scores: dict[str, bool] = field(default_factory=dict)  # empty if a judge has yet to decide
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Asker:
    """A started backend, and how it is asked."""

    backend: InferenceBackend
    card: ModelCard
    max_tokens: int
    timeout_s: float
    instruction: str = ""  # stands before each question

    async def ask(self, item: Item) -> Scored:
        """Raises `EngineError` or `TimeoutError` if there is no answer."""
        async with asyncio.timeout(self.timeout_s):
            if isinstance(item.check, ChoiceCheck):
                return await self._choose(item, item.check)
            answer = await self._answer(self._messages(item), self.max_tokens)
        return Scored(answer.said, scores_of(item, answer.said), answer.num_tokens)

    async def judge(self, item: Item, answer: str) -> bool:
        """Whether this model, as a judge, finds the answer right."""
        check = item.check
        assert isinstance(check, JudgeCheck), check
        parts = [f"Question:\n{item.question}", f"Criteria:\n{check.criteria}"]
        if check.reference:
            parts.append(f"A right answer:\n{check.reference}")
        parts.append(f"Answer to grade:\n{answer}")
        messages = (
            {"role": "system", "content": _JUDGE},
            {"role": "user", "content": "\n\n".join(parts)},
        )
        grammar = GrammarSpec(
            kind="json_schema", source=msgspec.json.encode(VERDICT).decode(), param="judge"
        )
        async with asyncio.timeout(self.timeout_s):
            said = (await self._answer(messages, _VERDICT_TOKENS, grammar)).said
        try:
            return bool(msgspec.json.decode(said)["verdict"] == "right")
        except (msgspec.DecodeError, KeyError, TypeError):
            raise EngineError(f"the judge gave no verdict: {said[:80]!r}") from None

    def _messages(self, item: Item) -> tuple[dict[str, str], ...]:
        if not self.instruction:
            return item.messages
        last = item.messages[-1]
        text = f"{self.instruction}\n\n{last['content']}"
        return (*item.messages[:-1], {**last, "content": text})

    async def _answer(
        self,
        messages: tuple[dict[str, str], ...],
        max_tokens: int,
        grammar: GrammarSpec | None = None,
    ) -> ComparedAnswer:
        greedy = 1.0 if "temperature" in self.card.lacks else 0.0
        context = self._context(SamplingParams(max_tokens=max_tokens, temperature=greedy), grammar)
        if "chat" in self.card.capabilities:
            events = self.backend.chat(ChatRequest(context=context, messages=messages))
        else:
            text = "\n\n".join(each["content"] for each in messages)
            prompt = f"{text}\n\nAnswer:"
            events = self.backend.complete(CompletionRequest(context=context, prompt=prompt))
        answer = ComparedAnswer()
        async for event in events:
            answer.add(event)
        return answer

    async def _choose(self, item: Item, check: ChoiceCheck) -> Scored:
        text = "\n\n".join(each["content"] for each in self._messages(item))
        prompt = f"Question: {text}\nAnswer:"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score(prompt, f" {each}")) for each in check.choices]
        totals = [task.result() for task in tasks]
        per_byte = [
            total / len(choice.encode())
            for total, choice in zip(totals, check.choices, strict=True)
        ]
        chosen = totals.index(max(totals))
        scores = {
            "choice": chosen == check.right,
            "choice per byte": per_byte.index(max(per_byte)) == check.right,
        }
        return Scored(check.choices[chosen], scores)

    async def _score(self, prompt: str, continuation: str) -> float:
        """The log-probability of a continuation: the sum over its tokens."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, score_prompt=True)
        request = CompletionRequest(
            context=self._context(params), prompt=prompt + continuation, echo=True
        )
        async for event in self.backend.complete(request):
            if isinstance(event, TextEvent) and event.logprobs:
                return _sum_after(len(prompt.encode()), prompt + continuation, event.logprobs)
        raise EngineError(f"{self.card.id} gave no log-probabilities of the prompt")

    def _context(
        self, params: SamplingParams, grammar: GrammarSpec | None = None
    ) -> GenerationContext:
        return GenerationContext(
            request_id=f"eval-{secrets.token_hex(8)}",
            params=params,
            model=self.card.id,
            timeout_s=self.timeout_s,
            grammar=grammar,
        )


def _sum_after(start: int, text: str, tokens: tuple[TokenText, ...]) -> float:
    """The sum of the tokens of `text` that end after byte `start`. A token that stands across the
    border counts, because the continuation decides it.
    """
    total, end, size = 0.0, 0, len(text.encode())
    for token in tokens:
        if not token.in_text:
            continue
        end += len(token.token_bytes)
        if end > start and not math.isnan(token.logprob):
            total += token.logprob
        if end >= size:
            break
    return total


def scores_of(item: Item, answer: str) -> dict[str, bool]:
    """The scores of a text. There are none if a judge has to decide."""
    check = item.check
    if isinstance(check, TextCheck):
        return _text_scores(check, answer)
    if isinstance(check, SchemaCheck):
        return _schema_scores(check, answer)
    return {}


def _text_scores(check: TextCheck, answer: str) -> dict[str, bool]:
    if check.how == "number":
        found = predicted_number(answer)
        is_right = any(found == predicted_number(each) for each in check.accepted)
        return {
            "number": is_right and found is not None,
            "after ####": marked_number(answer) is not None,
        }
    compare = is_exact if check.how == "exact" else contains
    return {check.how: any(compare(answer, each) for each in check.accepted)}


def _schema_scores(check: SchemaCheck, answer: str) -> dict[str, bool]:
    try:
        value = json_in(answer)
    except ValueError:
        value, is_json = None, False
    else:
        is_json = True
    is_valid = is_json and satisfies(value, check.schema)
    scores = {"schema": is_valid}
    if check.has_value:
        scores["value"] = is_valid and value == check.value
    return scores
