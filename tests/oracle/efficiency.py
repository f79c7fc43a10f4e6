"""The work that a history needs: what is computed twice although it could be reused is wrong.

Calm histories have a bound: requests come and go, the pool has room, and nothing goes wrong. Then
each whole block of a prompt is computed once for all sequences that may share it.
"""

from collections.abc import Iterator

from engine.runtime.requests.images import image_digest, key_of
from engine.runtime.speculation.drafts import MAX_DRAFT
from tests.oracle.engines import Work
from tests.oracle.histories import History, Shape
from tests.oracle.run import Outcome, Submitted

CALM = frozenset({"submit", "turns"})
# Models that can't go on from each block of a prompt
NOT_WHOLE = ("window", "state", "ministral", "lfm2")
# Tokens that an engine computes until it hears that the frontend has found a stop string
LATE_STOP = 3


def excess(history: History, submitted: list[Submitted], outcome: Outcome) -> Iterator[str]:
    """What was more than the history needs, one line for each."""
    shape, sent = history.shape, [submitted[index] for index in outcome.results]
    yield from _too_much_cached(shape, submitted, outcome)
    is_poisoned = any(each.drawn["poison"] or each.alone.error for each in sent)
    is_plain = (
        shape["model"] not in ("window", "state", "ministral", "lfm2") or not shape["sharing"]
    )
    if history.kinds <= CALM and is_plain and not shape["tight"] and not is_poisoned:
        outcome.seen["calm"] += 1
        yield from _exceeded(outcome.work, _most(shape, sent, outcome))


def _exceeded(done: Work, most: Work) -> Iterator[str]:
    for name, limit in vars(most).items():
        if (count := getattr(done, name)) > limit:
            yield f"work: {count} {name}, and at most {limit} are needed"


def unusual_alone(each: Submitted, shape: Shape, outcome: Outcome) -> Iterator[str]:
    """A request alone computes each token once, and no token that it does not need."""
    if each.drawn["poison"] or outcome.results[0].error:
        return
    least = _most(shape, [each], outcome)
    yield from _exceeded(outcome.work, least)
    if outcome.work.prompt_tokens < least.prompt_tokens:
        yield f"work: {outcome.work.prompt_tokens} of {least.prompt_tokens} prompt tokens computed"


def _most(shape: Shape, sent: list[Submitted], outcome: Outcome) -> Work:
    """The most work that calm histories need."""
    most, size = Work(), shape["block_size"]
    blocks: set[tuple[object, ...]] = set()
    for each in sent:
        tokens, params = keyed(each), each.asked.request.params
        shared = (len(tokens) - 1) // size if shape["sharing"] else 0
        for choice in range(params.n):
            own = len(tokens)
            if not _starts_over(each, choice):
                own -= shared * size
                blocks |= {(*namespace(each), tokens[: size * (n + 1)]) for n in range(shared)}
            most.prompt_tokens += own
            most.steps += -(-len(tokens) // (shape["budget"] // 2)) + 1
        _add_answer(most, shape, each)
    most.prompt_tokens += size * len(blocks)
    most.tokens += most.prompt_tokens + outcome.seen["rejected"]
    most.messages += most.steps
    return most


def _add_answer(most: Work, shape: Shape, each: Submitted) -> None:
    """The work of the choices of a request after the prompt."""
    for choice in each.alone.choices.values():
        count = len(choice.token_ids)
        # A stop is seen when the next step was launched, and a stop string even later.
        late = shape["depth"] * (choice.finish_reason != "length")
        late = LATE_STOP if isinstance(choice.stop_reason, str) else late
        # A row that was launched too late may have a draft, which is never verified.
        most.tokens += count - 1 + late * (1 + MAX_DRAFT * bool(shape.get("speculates")))
        most.steps += count + late
        most.messages += each.drawn["captures"] is not None
    most.messages += bool(each.drawn["progress"]) * (1 + len(each.content.prompt))


def _starts_over(each: Submitted, choice: int) -> bool:
    """Whether a choice must compute its whole prompt, because it reads results of its tokens."""
    reads = any(phase != "decode" for _, phase in each.drawn["captures"] or ())
    return reads or (each.asked.request.params.score_prompt and choice == 0)


def namespace(each: Submitted) -> tuple[object, ...]:
    """Only requests with the same one may share blocks."""
    steering = each.drawn["steering"]
    num_prompt = len(each.content.prompt) if steering and steering[1] != "both" else 0
    return each.drawn["salt"], each.drawn["adapter"], str(steering), num_prompt


def keyed(each: Submitted) -> tuple[int, ...]:
    """The prompt, with what is in the place of its images."""
    tokens = list(each.content.prompt)
    for image in each.content.images:
        key = key_of(image_digest(image), image.count).tolist()
        tokens[image.start : image.start + image.count] = key
    return tuple(tokens)


def _too_much_cached(shape: Shape, submitted: list[Submitted], outcome: Outcome) -> Iterator[str]:
    """A request can only have as many cached tokens as somebody computed before."""
    lives = outcome.seen["kill"] + outcome.seen["swap"]
    for index, result in outcome.results.items():
        if result.usage is None:
            continue
        each, longest = submitted[index], 0
        for other in outcome.results:
            if other == index and each.asked.request.params.n == 1 and not lives:
                continue
            longest = max(longest, _num_shared(each, submitted[other]))
        size = shape["block_size"]
        most = min(longest, len(each.content.prompt) - 1) // size * size
        if not shape["sharing"]:
            most = 0
        if result.usage.cached_tokens > most or result.usage.cached_tokens % size:
            yield f"request {index}: {result.usage.cached_tokens} cached tokens of at most {most}"


def _num_shared(each: Submitted, other: Submitted) -> int:
    """How many tokens of a prompt another request computes too."""
    if namespace(each) != namespace(other):
        return 0
    prompt, longest = keyed(each), 0
    answers = [choice.token_ids for choice in other.alone.choices.values()] or [[]]
    for answer in answers:
        whole = (*keyed(other), *answer)
        pairs = zip(prompt, whole, strict=False)
        end = min(len(prompt), len(whole) + LATE_STOP)
        longest = max(longest, next((n for n, (a, b) in enumerate(pairs) if a != b), end))
    return longest
