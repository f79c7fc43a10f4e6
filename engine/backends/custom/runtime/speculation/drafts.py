"""Speculation: guesses the next tokens of a sequence, and verifies all of them in one step.

The guess is a draft: the tokens that followed the last tokens of the sequence at an earlier place.
This place is in the sequence itself, or in a text that the client expects. A draft makes the row of
its sequence longer. The step samples a token after each token of the row, with the same arithmetic
and the same random numbers as a step without a draft. A draft token is accepted if it is the token
that was sampled for its position. So the output does not depend on speculation, only its speed
does.
"""

import logging

from engine.backends.custom.runtime.budget import StepBudget
from engine.backends.custom.runtime.kv_cache import KVCache
from engine.backends.custom.runtime.model_runner import MAX_SCORED, RunnerSpec
from engine.backends.custom.runtime.sequence import Row, Sequence
from engine.backends.custom.runtime.speculation.lookup import MARGIN, Drafter, Odds, cached_rest
from engine.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_DRAFT = 16  # tokens
MAX_CREDIT = 8.0  # see `Drafter.credit`


def speculates(spec: RunnerSpec, setting: str) -> bool:
    """Whether steps verify drafts. The setting is "auto", "on" or "off"."""
    if setting == "on" and not spec.verifies_drafts:
        raise ConfigError(
            'performance.speculation = "on": this framework or model can\'t verify guessed tokens; '
            'set it to "auto"'
        )
    return setting != "off" and spec.verifies_drafts and (spec.has_exact_drafts or setting == "on")


class Speculation:
    """Adds drafts to the rows of a step, and takes the tokens of drafts that were right."""

    def __init__(self, kv: KVCache, budget: StepBudget) -> None:
        self._kv = kv
        self._budget = budget
        self._odds = Odds()
        self.num_drafted = 0
        self.num_accepted = 0

    def begin(self, seq: Sequence) -> None:
        """Give a new sequence a drafter, if its tokens can be verified. Some parameters depend on
        all earlier tokens in a way that the sampling inputs of a step cannot express.
        """
        params = seq.params
        depends_on_output = params.sampled_on_host or params.dry_multiplier > 0 or seq.bad_words
        if depends_on_output or seq.probe is not None:
            return
        if not seq.pools and seq.max_tokens > 1:
            seq.drafter = Drafter(seq.tokens, seq.expected, self._odds)

    def add_drafts(self, rows: list[Row], budget: int) -> int:
        """Replace rows of one token by rows with drafts, where that is expected to save time. At
        most `budget` tokens are added. Returns the number of tokens of all rows with drafts.
        """
        num_decoding = sum(row.samples and row.length == 1 for row in rows)
        room = min(budget, MAX_SCORED)
        if not num_decoding or room <= 0 or any(row.num_scored for row in rows):
            return 0
        price = self._budget.price(num_decoding)
        if MARGIN * price >= 1:
            return 0
        num_tokens = 0
        for index, row in enumerate(rows):
            seq, drafter = row.seq, row.seq.drafter
            if drafter is None or not _can_follow(row):
                continue
            try:
                if drafter.asks_cache:
                    drafter.expect(cached_rest(self._kv, seq.namespace, seq.tokens))
                drafter.follow()
                draft: tuple[int, ...] = ()
                if drafter.match:
                    draft = self._draft(row, drafter, price, room, len(rows))
            except Exception:
                log.exception("request %s goes on without speculation", seq.request_id)
                seq.drafter, draft = None, ()
            if draft:
                rows[index] = row._replace(length=1 + len(draft), draft=draft)
                seq.num_computed += len(draft)
                room -= len(draft)
                num_tokens += 1 + len(draft)
        return num_tokens

    def accept(self, row: Row, sampled: list[int], is_finite: bool) -> list[int]:
        """Verify a draft. `sampled` are the tokens that the step sampled after each token of the
        row. Returns those that follow from right tokens, and reduces `num_computed` to these. If
        the row gave non-finite values, none count: the draft may be the reason. The sequence then
        goes on without drafts.
        """
        seq, draft = row.seq, row.draft
        count = 0
        while is_finite and count < len(draft) and draft[count] == sampled[count]:
            count += 1
        self.num_drafted += len(draft)
        self.num_accepted += count
        if not is_finite:
            seq.drafter = None
        if seq.drafter is not None:
            seq.drafter.credit = min(seq.drafter.credit + count, MAX_CREDIT)
        num_taken = count + 1 if is_finite else 0
        if seq.life == row.life:
            seq.num_computed -= row.length - num_taken
        return sampled[:num_taken]

    def _draft(
        self, row: Row, drafter: Drafter, price: float, room: int, spare: int
    ) -> tuple[int, ...]:
        """A draft of at most `room` tokens. It may take KV blocks while `spare` are left."""
        seq, before = row.seq, row.start + 1
        limit = min(MAX_DRAFT, room, seq.max_len - before, self._kv.max_row - 1)
        limit = min(limit, int(drafter.credit / price))
        # With overlapped steps, the first guess is a token that is being sampled.
        num_sampling = before - len(seq.tokens)
        count = self._odds.worthwhile(drafter.match, price, limit + num_sampling)
        draft = drafter.guess(count)[num_sampling:]
        for index, token in enumerate(draft):
            # The token after the draft may be a stop token. Tokens of images are negative.
            if token < 0 or token in seq.stop_ids:
                del draft[index:]
                break
        if draft and seq.constraint is not None:
            del draft[seq.constraint.num_allowed(draft) :]
        end = before + len(draft)
        if end > seq.room and not self._kv.extend(seq, end, spare):
            del draft[seq.room - before :]
        drafter.credit -= price * len(draft)
        return tuple(draft)


def _can_follow(row: Row) -> bool:
    """Whether a draft can follow the row's token. The last token of a prompt is not decoded. If the
    host does not know the row's token yet, grammar and penalties cannot count it.
    """
    seq = row.seq
    if row.length != 1 or row.start < seq.num_prompt:
        return False
    if row.start < len(seq.tokens):
        return True
    return seq.constraint is None and not seq.params.has_penalties
