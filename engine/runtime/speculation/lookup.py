"""Guesses the next tokens of a sequence by looking for its last tokens in a text."""

import numpy as np

from engine.runtime.kv_cache import KVCache
from engine.runtime.sequence import Tokens, packed

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
