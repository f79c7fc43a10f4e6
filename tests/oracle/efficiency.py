"""The work that a history needs: what is computed twice although it could be reused is wrong.

A request alone has an exact amount. So have the prompts of calm histories: requests come and go,
the pool has room, and nothing goes wrong but that cached blocks are lost which a tier still has.
Each whole block of a prompt is computed once for all sequences that may share it. For the other
work of calm histories, there is a bound.
"""

from collections.abc import Iterable, Iterator

from engine.runtime.requests.images import image_digest, key_of
from engine.runtime.speculation.drafts import MAX_DRAFT
from tests.oracle.clock import PIECE_BYTES
from tests.oracle.engines import NotedSpeculation, Work
from tests.oracle.histories import History, Shape
from tests.oracle.requests import PLAIN
from tests.oracle.run import Outcome, Submitted
from tests.support.toy_engine.engine import is_wrong_guess

CALM = frozenset({"submit", "turns"})
LOSSES = frozenset({"evict", "flush"})  # of the prefix cache, whose blocks the tiers still have
# Models that can't go on from each block of a prompt
NOT_WHOLE = ("window", "state", "ministral", "lfm2")
# Tokens that an engine computes until it hears that the frontend has found a stop string
LATE_STOP = 3


def excess(history: History, submitted: list[Submitted], outcome: Outcome) -> Iterator[str]:
    """What was more than the history needs, one line for each."""
    shape, sent = history.shape, [submitted[index] for index in outcome.results]
    yield from _too_much_cached(shape, submitted, outcome)
    yield from _missed_guesses(shape, submitted, outcome)
    is_poisoned = any(each.drawn["poison"] or each.alone.error for each in sent)
    is_plain = shape["model"] not in NOT_WHOLE or not shape["sharing"]
    is_plain &= not shape.get("has_node")  # each engine has a prefix cache of its own
    quiet = CALM | LOSSES if shape["tiers"] else CALM
    if history.kinds <= quiet and is_plain and not shape["tight"] and not is_poisoned:
        outcome.seen["calm"] += 1
        most = _most(shape, sent, outcome)
        if history.kinds & LOSSES:
            most.loaded_blocks = sum(map(_num_loadable, sent, [shape] * len(sent)))
        yield from _exceeded(outcome.work, most)
        is_whole = not any(result.error for result in outcome.results.values())
        if is_whole and not _depends_on_order(shape, sent):
            outcome.seen["exact"] += 1
            yield from _short(outcome.work, most, ["prompt_tokens"])


def _exceeded(done: Work, most: Work) -> Iterator[str]:
    for name, limit in vars(most).items():
        if (count := getattr(done, name)) > limit:
            yield f"work: {count} {name}, and at most {limit} are needed"


def _short(done: Work, least: Work, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if (count := getattr(done, name)) < getattr(least, name):
            yield f"work: {count} {name}, and at least {getattr(least, name)} are needed"


def unusual_alone(each: Submitted, shape: Shape, outcome: Outcome) -> Iterator[str]:
    """A request alone does an exact amount of work: each prompt token is computed once for each
    choice, and each token of an answer but the last one. A step goes on with all choices, and sends
    one message.
    """
    if each.drawn["poison"] or outcome.results[0].error:
        return
    choices = outcome.results[0].choices.values()
    assert outcome.results[0].usage is not None
    num_generated = outcome.results[0].usage.completion_tokens
    exact = Work(prompt_tokens=len(each.content.prompt) * len(choices))
    exact.tokens = exact.prompt_tokens + num_generated - len(choices)
    exact.steps = exact.messages = max(len(choice.token_ids) for choice in choices)
    yield from _short(outcome.work, exact, vars(exact))
    # The engine answers when the frontend ends a choice at a stop string.
    exact.messages += sum(isinstance(choice.stop_reason, str) for choice in choices)
    # A step may not have room for the prompts of all choices.
    num_more = -(-exact.prompt_tokens // (shape["budget"] // 2)) - 1
    exact.steps, exact.messages = exact.steps + num_more, exact.messages + num_more
    yield from _exceeded(outcome.work, exact)


def _missed_guesses(shape: Shape, submitted: list[Submitted], outcome: Outcome) -> Iterator[str]:
    """The toy draft model is the model itself, but for known places. So it is known how many tokens
    of a draft are right, if the request has nothing that the draft model does not know.
    """
    if "guessed" not in shape:
        return
    known = {f"r{n}" for n, each in enumerate(submitted) if each.drawn.features.keys() <= PLAIN}
    for engine in outcome.engines:
        speculation = engine.scheduler.find(NotedSpeculation)
        for name, start, length, count in () if speculation is None else speculation.notes:
            places = range(start, start + length)
            wrong = (n for n, at in enumerate(places) if is_wrong_guess(at, shape["guessed"]))
            expected = next(wrong, length)
            outcome.seen["known_drafts"] += name in known
            if name in known and count != expected:
                yield f"{name}: {count} of {expected} right guesses from token {start} on"


def _num_loadable(each: Submitted, shape: Shape) -> int:
    """How many blocks the choices of a request may load."""
    return (len(each.content.prompt) - 1) // shape["block_size"] * each.asked.request.params.n


def _depends_on_order(shape: Shape, sent: list[Submitted]) -> bool:
    """Whether a prompt begins with a whole other prompt and maybe a part of its answer, or with one
    that is computed whole anyway. It may use these blocks, but only if the other one was earlier.
    """
    size = shape["block_size"]
    if any(_starts_over(each, 0) for each in sent):
        return True
    for each in sent:
        useful = len(each.content.prompt) - 1
        for other in sent:
            first = min(useful, _num_shared(each, other)) // size
            if first * size > len(other.content.prompt) - 1:
                return True
    return False


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
        most.messages += each.drawn.reads * (1 + len(each.alone.captured or b"") // PIECE_BYTES)
    most.messages += bool(each.drawn["progress"]) * (1 + len(each.content.prompt))


def _starts_over(each: Submitted, choice: int) -> bool:
    """Whether a choice must compute its whole prompt, because it reads results of its tokens."""
    drawn = each.drawn
    phases = [phase for _, phase in drawn["captures"] or ()]
    phases += [drawn["lens"][-1]] if drawn["lens"] else []
    # An attention pattern has the keys of all positions.
    reads = drawn["pattern"] is not None or any(phase != "decode" for phase in phases)
    reads |= drawn["attribution"] is not None
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
    lives = outcome.seen["kill"] + outcome.seen["lose_node"] + outcome.seen["swap"]
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
