"""Checks that others have the node token, by proofs over random numbers that this process made."""

import secrets
import time

from engine.core.shards.link import is_same, proof_of

PROOF_SCHEME = "Proof"  # of the authorization
CHALLENGE_S = 10.0  # a proof must come this soon after its random number
_SECRET = secrets.token_bytes(32)  # of the random numbers, which need not be remembered


def new_challenge() -> str:
    """A number that must be answered soon."""
    return _challenge_of(str(int(time.monotonic())))


def is_proved(token: bytes, what: str, authorization: str) -> bool:
    """Whether an authorization proves the token for `what`: "join", or a method and a path."""
    scheme, *words = authorization.split()[:5] or [""]
    if scheme != PROOF_SCHEME or len(words) != 3:
        return False
    challenge, theirs, proof = words
    return is_same(proof, proof_of(token, what, challenge, theirs)) and _is_recent(challenge)


def proof_for(token: bytes, what: str, challenge: str, ours: str) -> str:
    """The authorization of one who has the token."""
    return f"{PROOF_SCHEME} {challenge} {ours} {proof_of(token, what, challenge, ours)}"


def _challenge_of(made_at: str) -> str:
    return f"{made_at}-{proof_of(_SECRET, 'challenge', made_at, '')}"


def _is_recent(challenge: str) -> bool:
    made_at = challenge.partition("-")[0]
    if not is_same(challenge, _challenge_of(made_at)):
        return False
    return time.monotonic() - int(made_at) <= CHALLENGE_S
