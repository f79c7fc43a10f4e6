"""Speculation: guesses the next tokens of a sequence, and verifies all of them in one step.

The guess is a draft. It is what followed the last tokens of the sequence at an earlier place, in
the sequence itself or in a text that the client expects, or it is what a small model says
(`ModelDrafts`). For each sequence and step, the source that is expected to save more time drafts. A
draft makes the row of its sequence longer. The step samples a token after each token of the row,
with the same arithmetic and the same random numbers as a step without a draft. A draft token is
accepted if it is the token that was sampled for its position. So the output does not depend on
speculation, only its speed does.
"""

import logging
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import structs

from engine.core.errors import ConfigError
from engine.core.interfaces.request import GenerateRequest
from engine.core.interfaces.stats import EngineStats
from engine.runtime.budget import StepBudget
from engine.runtime.kv_cache import KVCache
from engine.runtime.model_runner import MAX_SCORED, RunnerSpec
from engine.runtime.sequence import Extension, Row, Sequence, Tokens, packed

if TYPE_CHECKING:
    from engine.runtime.speculation.model_drafts import ModelDrafts, Offer

log = logging.getLogger(__name__)

MAX_DRAFT = 16  # tokens
MAX_CREDIT = 8.0  # see `Drafter.credit`
MIN_MATCH = 3  # at least so many last tokens must occur earlier, or nothing is guessed
MAX_MATCH = 32  # longer matches count as this long
MAX_SEARCHED = 16_384  # tokens of a text, counted from its end, among which a match is searched
MAX_CACHED_REST = 4096  # with this many tokens, a cached answer is not read any further
EXPECTED_MATCH = 8  # the start of an expected text counts as a match of this length
MEMORY = 0.97  # the weight of older guesses is multiplied by this with each new one
PRIOR_GUESSES = 8.0  # the initial odds count as this many guesses
MARGIN = 1.2  # a draft token must be worth this many times its price
# What drafts may cost a sequence before they pay, in units of a generated token's cost.
FIRST_CREDIT = 1.0
CREDIT_PER_TOKEN = 0.01


def speculates(spec: RunnerSpec, setting: str) -> bool:
    """Whether steps verify drafts. The setting is "auto", "on" or "off"."""
    if setting == "on" and not spec.verifies_drafts:
        raise ConfigError(
            'performance.speculation = "on": this framework or model can\'t verify guessed tokens; '
            'set it to "auto"'
        )
    return setting != "off" and spec.verifies_drafts and (spec.has_exact_drafts or setting == "on")


class Odds:
    """How often guesses were right, by the length of their match. All sequences share it."""

    def __init__(self) -> None:
        self._guesses = [PRIOR_GUESSES] * (MAX_MATCH + 1)
        self._hits = [PRIOR_GUESSES * length / (length + 2) for length in range(MAX_MATCH + 1)]

    def add(self, match: int, is_right: bool) -> None:
        self._guesses[match] = MEMORY * self._guesses[match] + 1
        self._hits[match] = MEMORY * self._hits[match] + is_right

    def worthwhile(self, match: int, price: float, limit: int) -> int:
        """How many tokens after a match to draft, at most `limit`. The chance that a draft token is
        accepted must exceed its price.
        """
        chance = 1.0
        for count in range(limit):
            chance *= self._hits[match] / self._guesses[match]
            if chance < MARGIN * price:
                return count
            match = min(match + 1, MAX_MATCH)
        return limit

    def gain(self, match: int, price: float, count: int) -> float:
        """How much a draft of `count` tokens after a match is expected to save, in units of a
        generated token's cost.
        """
        chance, right = 1.0, 0.0
        for _ in range(count):
            chance *= self._hits[match] / self._guesses[match]
            right += chance
            match = min(match + 1, MAX_MATCH)
        return right - price * max(count, 0)


class Drafter:
    """Guesses the next tokens of one sequence. Every guess counts for the odds, whether it becomes
    a draft or not.
    """

    def __init__(self, tokens: Tokens, expected: Tokens, odds: Odds) -> None:
        """`tokens` are those of the sequence, and grow with it. `expected` is the text that the
        client expects as the output. It may be empty.
        """
        self._tokens = tokens
        self._expected = expected
        self._odds = odds
        self._num_followed = len(tokens)
        # The guess for the next token is the token at `_place` in `_text`.
        self._text, self._place = expected, 0
        self.match = EXPECTED_MATCH if len(expected) else 0  # 0: there is no guess
        self.credit = FIRST_CREDIT
        self.asks_cache = not len(expected)  # whether a cached answer may replace `expected`
        self.asks_model = True  # whether the draft model, if there is one, may guess
        # Of the last draft: whether the draft model guessed it, and the price of a token
        self.was_by_model, self.price = False, 0.0

    def expect(self, rest: Tokens) -> None:
        """Take `rest` as the expected text. Its first token is the guess for the next token."""
        self.asks_cache = False
        if len(rest):
            self._expected = self._text = rest
            self._place, self.match = 0, EXPECTED_MATCH
            self._num_followed = len(self._tokens)

    def follow(self) -> None:
        """Compare the guesses with the tokens that were generated meanwhile, and guess again."""
        tokens, text = self._tokens, self._text
        self.credit += CREDIT_PER_TOKEN * (len(tokens) - self._num_followed)
        for position in range(self._num_followed, len(tokens)):
            if not self.match or self._place >= len(text):
                self.match = 0
                break
            is_right = text[self._place] == tokens[position]
            self._odds.add(self.match, is_right)
            self._place += 1
            self.match = min(self.match + 1, MAX_MATCH) if is_right else 0
        self._num_followed = len(tokens)
        if not self.match:
            self._search()

    def guess(self, count: int) -> list[int]:
        """The next `count` tokens, or fewer. If the sequence repeats itself, so does the guess."""
        text, place = self._text, self._place
        found = text[place : place + count].tolist()
        if text is self._tokens:
            period = len(found)
            found += [found[index % period] for index in range(period, count)]
        return found

    def _search(self) -> None:
        for text in (self._tokens, self._expected):
            match, place = longest_match(self._tokens, text)
            if match > self.match:
                self.match, self._text, self._place = match, text, place


class _Terms(msgspec.Struct, frozen=True):
    """What the drafts of a step may cost."""

    price: float  # of verifying one token, in units of a generated token's cost
    spare: int  # KV blocks that drafts leave to others
    limit: int  # tokens of a draft of the draft model


class Speculation(Extension):
    """Adds drafts to the rows of a step, and takes the tokens of drafts that were right."""

    def __init__(self, kv: KVCache, budget: StepBudget, model: "ModelDrafts | None" = None) -> None:
        self._kv = kv
        self._budget = budget
        self._odds = Odds()
        self.model = model  # None: there is no draft model
        # Whether the next step should be planned when all tokens are known. Without overlapped
        # steps, they always are. The draft model needs them. If most rows have drafts, the others
        # wait for these rows, so that all are computed together again.
        self.awaits_tokens = False
        # Of the step that was planned last
        self.num_drafting = 0  # number of tokens in rows with drafts
        self.draft_s = 0.0  # seconds that the draft model took
        # What guesses the next tokens of each sequence. Of others, each step samples one token.
        self._drafters: dict[Sequence, Drafter] = {}
        self.num_drafted = self.num_accepted = 0
        self.num_model_drafted = self.num_model_accepted = 0  # those of the draft model

    def queued(
        self, seq: Sequence, request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        """Give a new sequence a drafter, if its tokens can be verified. Some parameters depend on
        all earlier tokens in a way that the sampling inputs of a step cannot express.
        """
        params = seq.params
        depends_on_output = params.sampled_on_host or params.dry_multiplier > 0
        depends_on_output |= seq.rules is not None and bool(seq.rules.bad_words)
        if depends_on_output or any(each.drafts == "none" for each in seq.extensions):
            return
        if not seq.pools and seq.max_tokens > 1:
            self._drafters[seq] = Drafter(seq.tokens, packed(request.expected), self._odds)

    def ended(self, seq: Sequence) -> None:
        self._drafters.pop(seq, None)
        if self.model is not None:
            self.model.end(seq)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return structs.replace(
            stats,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            num_model_drafted_tokens=self.num_model_drafted,
            num_model_accepted_tokens=self.num_model_accepted,
        )

    def check(self) -> None:
        if self.model is not None:
            self.model.check()

    def plan(self, rows: list[Row], budget: int) -> None:
        """Replace rows of one token by rows with drafts, where that is expected to save time."""
        self.num_drafting = self._add_drafts(rows, budget - sum([row.length for row in rows]))

    def _add_drafts(self, rows: list[Row], budget: int) -> int:
        """Returns the number of tokens of all rows with drafts."""
        self.awaits_tokens, self.draft_s = False, 0.0
        num_decoding = sum(row.samples and row.length == 1 for row in rows)
        room = self._room(rows, num_decoding, budget)
        has_model = self.model is not None and num_decoding and self.model.begin(num_decoding)
        if not num_decoding or room <= 0 or any(row.num_scored for row in rows):
            return 0
        price = self._budget.price(num_decoding)
        terms = _Terms(price, len(rows), max(1, room // num_decoding))
        if MARGIN * terms.price >= 1:
            return 0
        asked: list[tuple[int, Offer]] = []  # rows for which the draft model guesses
        found: list[tuple[int, int]] = []  # rows with a guess by lookup, and its useful length
        for index, row in enumerate(rows):
            drafter = self._drafters.get(row.seq)
            if drafter is None or not _can_follow(row):
                continue
            try:
                if drafter.asks_cache:
                    drafter.expect(cached_rest(self._kv, row.seq.namespace, row.seq.tokens))
                drafter.follow()
                count = self._num_worthwhile(row, drafter, terms.price, room)
                most = min(room, terms.limit)
                offer = self._offer(row, drafter, terms, most, count) if has_model else None
            except Exception:
                self._go_without(row.seq)
                continue
            if offer is not None:
                asked.append((index, offer))
                room -= offer.count
            elif count:
                found.append((index, count))
        num_tokens = self._add_found(rows, found, terms, room) if found else 0
        num_tokens += self._add_model_drafts(rows, asked, terms) if asked else 0
        if 2 * sum(bool(row.draft) for row in rows) >= len(rows):
            self.awaits_tokens = True
        return num_tokens

    def _add_found(
        self, rows: list[Row], found: list[tuple[int, int]], terms: _Terms, room: int
    ) -> int:
        """Draft what lookup has found. Returns the number of tokens of the rows that get a
        draft.
        """
        num_tokens = 0
        counts = fair_shares([count for _, count in found], room)
        for (index, _), count in zip(found, counts, strict=True):
            row, drafter = rows[index], self._drafters[rows[index].seq]
            try:
                guess = drafter.guess(count + _num_sampling(row))[_num_sampling(row) :]
                draft = self._fitting(row, guess, terms)
            except Exception:
                self._go_without(row.seq)
                continue
            if draft:
                rows[index] = _with_draft(row, drafter, draft, False, terms.price)
                num_tokens += 1 + len(draft)
        return num_tokens

    def _room(self, rows: list[Row], num_decoding: int, budget: int) -> int:
        """How many tokens the drafts of a step may have. With several sequences, each waits for the
        drafts of all others, so the step is kept short.
        """
        room = min(budget, MAX_SCORED)
        if num_decoding <= 1:
            return room
        num_prompt_tokens = sum(row.length for row in rows) - num_decoding
        return min(room, self._budget.draft_tokens(num_decoding, num_prompt_tokens))

    def _add_model_drafts(
        self, rows: list[Row], asked: "list[tuple[int, Offer]]", terms: _Terms
    ) -> int:
        """Let the draft model guess for some rows. Returns the number of tokens of those that get a
        draft. If the draft model fails, the engine goes on without it, and its memory is freed.
        """
        model = self.model
        assert model is not None
        try:
            drafts = model.draft([(rows[index].seq, offer.count) for index, offer in asked])
        except Exception:
            log.exception("the draft model failed; the engine goes on without it")
            self.model = None
            model.close()
            return 0
        self.draft_s, num_tokens = model.draft_s, 0
        for (index, offer), guess in zip(asked, drafts, strict=True):
            row, drafter = rows[index], self._drafters[rows[index].seq]
            if guess is None:
                drafter.asks_model = False
            elif draft := self._fitting(row, guess, terms):
                rows[index] = _with_draft(row, drafter, draft, True, terms.price)
                drafter.credit -= (offer.price - terms.price) * len(guess)
                num_tokens += 1 + len(draft)
        return num_tokens

    def verified(self, row: Row, num_accepted: int, is_finite: bool) -> None:
        """A draft was verified. If its row gave non-finite values, the sequence goes on without
        drafts.
        """
        seq, num_drafted = row.seq, len(row.draft)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        drafter = self._drafters.get(seq)
        if drafter is not None:
            drafter.credit = min(drafter.credit + num_accepted, MAX_CREDIT)
            if drafter.was_by_model:
                self.num_model_drafted += num_drafted
                self.num_model_accepted += num_accepted
                if self.model is not None:
                    self.model.verified(seq, num_drafted, num_accepted, drafter.price)
        if not is_finite:
            self._drafters.pop(seq, None)

    def _num_worthwhile(self, row: Row, drafter: Drafter, price: float, room: int) -> int:
        """How many tokens to draft by lookup. With overlapped steps, the first guess is for the
        token that is being sampled, which is not drafted.
        """
        if not drafter.match:
            return 0
        limit = min(self._limit(row, room), int(drafter.credit / price))
        sampling = _num_sampling(row)
        return max(0, self._odds.worthwhile(drafter.match, price, limit + sampling) - sampling)

    def _limit(self, row: Row, room: int) -> int:
        """The max number of tokens of a draft."""
        return min(MAX_DRAFT, room, row.seq.max_len - row.start - 1, self._kv.max_row - 1)

    def _offer(
        self, row: Row, drafter: Drafter, terms: _Terms, room: int, count: int
    ) -> "Offer | None":
        """What the draft model would do for a row, or None if lookup, which would draft `count`
        tokens, is expected to save more.
        """
        assert self.model is not None
        if not drafter.asks_model:
            return None
        limit = self._limit(row, room)
        offer = self.model.offer(row.seq, terms.price, drafter.credit, limit)
        if offer.gain <= self._odds.gain(drafter.match, terms.price, count):
            return None
        if _num_sampling(row):
            self.awaits_tokens = True
            return None
        return offer

    def _fitting(self, row: Row, draft: list[int], terms: _Terms) -> tuple[int, ...]:
        """The part of a draft that the step can verify: up to a stop token, as far as the grammar
        allows it, and as far as there are KV blocks.
        """
        seq, before = row.seq, row.start + 1
        for index, token in enumerate(draft):
            # The token after the draft may be a stop token. Tokens of images are negative.
            if token < 0 or token in seq.stop_ids:
                del draft[index:]
                break
        if draft and seq.rules is not None and seq.rules.constraint is not None:
            del draft[seq.rules.constraint.num_allowed(draft) :]
        end = before + len(draft)
        if end > seq.room and not self._kv.extend(seq, end, terms.spare):
            del draft[seq.room - before :]
        return tuple(draft)

    def _go_without(self, seq: Sequence) -> None:
        """The guess for a sequence failed. Only the drafts of this sequence end."""
        log.exception("request %s goes on without speculation", seq.request_id)
        self._drafters.pop(seq, None)


def fair_shares(counts: list[int], room: int) -> list[int]:
    """Divide the room of a step's drafts. Short drafts leave their part of it to longer ones."""
    shares = [0] * len(counts)
    by_length = sorted(range(len(counts)), key=counts.__getitem__)
    for place, index in enumerate(by_length):
        shares[index] = min(counts[index], room // (len(counts) - place))
        room -= shares[index]
    return shares


def _num_sampling(row: Row) -> int:
    """1 if the token of a decode row is still being sampled, else 0."""
    return row.start + 1 - len(row.seq.tokens)


def _with_draft(
    row: Row, drafter: Drafter, draft: tuple[int, ...], by_model: bool, price: float
) -> Row:
    row.seq.num_computed += len(draft)
    drafter.credit -= price * len(draft)
    drafter.was_by_model, drafter.price = by_model, price
    return row._replace(length=1 + len(draft), draft=draft)


def _can_follow(row: Row) -> bool:
    """Whether a draft can follow the row's token. The last token of a prompt is not decoded. If the
    host does not know the row's token yet, grammar and penalties cannot count it.
    """
    seq = row.seq
    if row.length != 1 or row.start < seq.num_prompt:
        return False
    if row.start < len(seq.tokens):
        return True
    is_free = seq.rules is None or seq.rules.constraint is None
    return is_free and not seq.params.has_penalties


def cached_rest(kv: KVCache, namespace: str, tokens: Tokens) -> Tokens:
    """The tokens that followed `tokens` in an earlier sequence, as far as they are cached. If there
    were several sequences, the one that was used last counts.
    """
    node, after, num_matched = kv.radix.root(namespace), packed(), 0
    for node, count in kv.radix.walk(namespace, tokens):
        num_matched += count
        after = node.tokens[count * kv.block_size :]
    last = tokens[num_matched * kv.block_size :]  # less than a block, or not cached
    while node is not None and len(after) < MAX_CACHED_REST and node.children:
        known = last[len(after) :]
        followers = [
            child for child in node.children.values() if child.tokens[: len(known)] == known
        ]
        if not followers:
            break
        node = max(followers, key=lambda child: child.last_used)
        after += node.tokens
    return after[len(last) :] if after[: len(last)] == last else packed()


def longest_match(tokens: Tokens, text: Tokens) -> tuple[int, int]:
    """Find the last tokens of a sequence in a text, before its last token. Returns the number of
    tokens that match, and the place after them. The match is as long and as late as possible. (0,
    0) if it is shorter than MIN_MATCH.
    """
    if len(tokens) < MIN_MATCH:
        return 0, 0
    # Most searches find nothing. A search of bytes tells that in a few microseconds.
    data = text[-MAX_SEARCHED:].tobytes()
    if data.rfind(tokens[-MIN_MATCH:].tobytes(), 0, -text.itemsize) < 0:
        return 0, 0
    view = np.frombuffer(data, np.int32)
    ends = np.flatnonzero(view[:-1] == tokens[-1])
    match = 1
    while len(ends) and match < min(MAX_MATCH, len(tokens)):
        longer = ends[ends >= match]
        longer = longer[view[longer - match] == tokens[-1 - match]]
        if not len(longer):
            break
        ends = longer
        match += 1
    if match < MIN_MATCH or not len(ends):
        return 0, 0
    return match, len(text) - len(view) + int(ends[-1]) + 1
