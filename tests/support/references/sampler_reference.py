"""llama.cpp's samplers, DRY and bad words as their authors define them, written for clarity: lists
of candidates, float64, no shortcuts. The engine's samplers must agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.core.interfaces.request import SAMPLERS, SamplingParams
from engine.runtime.samplers.chain import XTC_STREAM
from engine.runtime.samplers.host_sampler import gumbel, row_keys, token_words

Candidates = list[tuple[int, float]]  # token id and logit, likeliest first


@dataclass
class Reference:
    """Samples one choice of a request, token by token."""

    params: SamplingParams
    prompt: Sequence[int]
    seed: int
    choice: int = 0
    bad_words: Sequence[tuple[int, ...]] = ()
    breakers: Sequence[tuple[int, ...]] = ()
    output: list[int] = field(default_factory=list)
    mu: float | None = None  # None: before the first token

    def next_token(self, logits: np.ndarray) -> int:
        """Sample a token from float32 logits (V,), and add it to the output."""
        token = self._sample(self.adjusted(logits))
        self.output.append(token)
        return token

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        params, found = self.params, logits.astype(np.float64)
        tokens = [*self.prompt, *self.output]
        start = 0 if params.repeat_last_n < 0 else max(0, len(tokens) - params.repeat_last_n)
        output = tokens[max(start, len(self.prompt)) :]
        for token in set(tokens[start:]):
            value, penalty = found[token], params.repetition_penalty
            found[token] = value / penalty if value > 0 else value * penalty
            found[token] -= params.frequency_penalty * output.count(token)
            found[token] -= params.presence_penalty * (token in output)
        for token, bias in params.logit_bias.items():
            found[token] += bias
        for token, penalty in self.dry(tokens).items():
            found[token] -= penalty
        found[self.banned()] = -math.inf
        if params.allowed_token_ids:
            forbidden = set(range(len(found))) - set(params.allowed_token_ids)
            found[list(forbidden)] = -math.inf
        return found

    def banned(self) -> list[int]:
        """The last token of each bad word whose other tokens end the output."""
        texts = [(*self.output, word[-1]) for word in self.bad_words]
        pairs = zip(self.bad_words, texts, strict=True)
        return [word[-1] for word, text in pairs if text[-len(word) :] == word]

    def dry(self, tokens: Sequence[int]) -> dict[int, float]:
        params = self.params
        if not params.dry_multiplier:
            return {}
        if params.dry_penalty_last_n >= 0:
            tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
        limit = len(tokens)
        for start in range(len(tokens)):
            fits = [
                len(each)
                for each in self.breakers
                if tuple(tokens[start : start + len(each)]) == each
            ]
            limit = len(tokens) - start - max(fits) if fits else limit
        longest: dict[int, int] = {}
        for end in range(len(tokens) - 1):
            length = 0
            while length < min(limit, end + 1) and tokens[end - length] == tokens[-1 - length]:
                length += 1
            if length >= params.dry_allowed_length:
                token = tokens[end + 1]
                longest[token] = max(length, longest.get(token, 0))
        return {
            token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            for token, length in longest.items()
            if (token,) not in self.breakers
        }

    def _sample(self, logits: np.ndarray) -> int:
        params, position = self.params, np.array([len(self.prompt) + len(self.output)], np.int32)
        choice = np.array([self.choice], np.int32)
        chance = row_keys(np.array([self.seed ^ XTC_STREAM]), choice, position)
        uniform = float(chance.view(np.uint32)[0, 0]) / 2**32
        order = params.samplers or SAMPLERS
        if not params.has_chain:
            order = ("temperature", "top_k", "top_p", "min_p")
        found = ranked([(token, v) for token, v in enumerate(logits.tolist()) if v > -math.inf])
        if params.mirostat:
            found = scaled(found, params)
            self.mu = 2 * params.mirostat_tau if self.mu is None else self.mu
            found = mirostat(found, params.mirostat, self.mu, len(logits))
        else:
            for name in order:
                found = ranked(apply(name, found, params, uniform))
        keys = row_keys(np.array([self.seed]), choice, position)
        noise = gumbel(np, keys, token_words(len(logits)))[0]
        best = max(found, key=lambda each: each[1] + float(noise[each[0]]))
        if self.mu is not None:
            surprise = -math.log2(probabilities(found)[found.index(best)])
            self.mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
        return best[0]


def ranked(found: Candidates) -> Candidates:
    return sorted(found, key=lambda each: -each[1])


def probabilities(found: Candidates) -> list[float]:
    weights = [math.exp(logit - found[0][1]) for _, logit in found]
    return [weight / sum(weights) for weight in weights]


def apply(name: str, found: Candidates, params: SamplingParams, uniform: float) -> Candidates:
    """What one sampler leaves of candidates that are sorted."""
    probs, least = probabilities(found), max(params.min_keep, 1)
    if name == "top_n_sigma" and params.top_n_sigma > 0:
        floor = found[0][1] - params.top_n_sigma * float(np.std([logit for _, logit in found]))
        return [each for each in found if each[1] >= floor]
    if name == "top_k" and params.top_k:
        return found[: params.top_k]
    if name == "top_p" and params.top_p < 1:
        count = next((i for i in range(len(found)) if sum(probs[:i]) >= params.top_p), len(found))
        return found[: max(count, least)]
    if name == "min_p":
        kept = [p >= params.min_p * probs[0] for p in probs]
        return found[: max(sum(kept), least)]
    if name == "typical_p" and params.typical_p < 1:
        return typical(found, probs, params.typical_p, least)
    if name == "xtc" and uniform < params.xtc_probability and params.xtc_threshold <= 0.5:
        above = sum(p >= params.xtc_threshold for p in probs)
        is_enough = len(found) - (above - 1) >= params.min_keep
        return found[above - 1 :] if above > 1 and is_enough else found
    return scaled(found, params) if name == "temperature" else found


def typical(found: Candidates, probs: list[float], mass: float, least: int) -> Candidates:
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    far = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]
    order = sorted(range(len(found)), key=lambda index: far[index])
    kept: Candidates = []
    total = 0.0
    for index in order:
        kept.append(found[index])
        total += probs[index]
        if total > mass and len(kept) >= least:
            break
    return kept


def scaled(found: Candidates, params: SamplingParams) -> Candidates:
    temperature = params.temperature
    if params.dynatemp_range > 0 and len(found) > 1:
        entropy = -sum(p * math.log(p) for p in probabilities(found) if p > 0)
        share = (entropy / math.log(len(found))) ** params.dynatemp_exponent
        low = max(0.0, temperature - params.dynatemp_range)
        temperature = low + (temperature + params.dynatemp_range - low) * share
    if temperature == 0:
        return found[:1]
    return [(token, logit / temperature) for token, logit in found]


def mirostat(found: Candidates, version: int, mu: float, vocab_size: int) -> Candidates:
    probs = probabilities(found)
    if version == 2:
        kept = [p > 0 and -math.log2(p) <= mu for p in probs]
        return found[: max(1, sum(kept))]
    if len(found) == 1:
        return found
    t = [math.log((i + 2) / (i + 1)) for i in range(min(100, len(found)) - 1)]
    b = [found[i][1] - found[i + 1][1] for i in range(len(t))]  # logs of ratios
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    epsilon = s - 1
    k = (epsilon * 2**mu / (1 - vocab_size**-epsilon)) ** (1 / s)
    return found[: max(1, int(min(k, len(found))))]
