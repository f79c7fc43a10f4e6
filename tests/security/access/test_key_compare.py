"""Keys are hashed, compared in constant time, and all of them every time (SEC-21; T1)."""

import ast
import inspect
import math
import random
import statistics
import time
from pathlib import Path

import pytest
from starlette.requests import Request

from engine.core.key_file import add_key, read_keys
from engine.servers.access import auth
from engine.servers.access.auth import Authenticator, KeyRing, digest_of
from engine.servers.access.quotas import AuthThrottle
from tests.support.servers.live_server import make_settings

KEY = "correct-horse-battery-staple-0123"
NUM_SAMPLES = 20_000


def test_digests_are_compared_by_one_function_and_never_skipped() -> None:
    tree = ast.parse(inspect.getsource(auth))
    (identify,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "identify"
    ]
    (loop,) = [node for node in ast.walk(identify) if isinstance(node, ast.For) and _is_outer(node)]
    leaves_early = (ast.Break, ast.Return, ast.Continue, ast.Raise)
    assert not any(isinstance(node, leaves_early) for node in ast.walk(loop))
    tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If)]
    assert [ast.unparse(test) for test in tests] == ["hmac.compare_digest(presented, expected)"]
    assert not any(isinstance(node, ast.Compare) for node in ast.walk(loop))


def _is_outer(loop: ast.For) -> bool:
    return any(isinstance(node, ast.For) for node in loop.body)


def test_keys_are_kept_only_as_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made, _ = add_key(file, "alice")
    ring = KeyRing(make_settings(server={"api_key": KEY, "keys_file": file}).server)
    assert {each.digest for each in ring.credentials} == {digest_of(KEY), digest_of(made)}
    assert all(len(each.digest) == 32 for each in ring.credentials)
    for held in (ring.entries, ring.credentials, read_keys(file)):
        assert KEY not in repr(held) and made not in repr(held)


def request_with(key: str) -> Request:
    route = type("Route", (), {"path": "/v1/models"})()
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "headers": headers, "route": route, "state": {}})


@pytest.mark.slow
def test_key_comparison_takes_the_same_time_for_nearly_right_keys() -> None:
    """By Welch's t over interleaved samples; one run in some hundreds fails by chance."""
    settings = make_settings(server={"api_key": KEY})
    authenticator = Authenticator(settings, KeyRing(settings.server), AuthThrottle(10**6))
    nearly = request_with(KEY[:-1] + "x")
    wrong = request_with("x" + KEY[1:])
    assert authenticator.identify(nearly) is None and authenticator.identify(wrong) is None
    found = [_t_of(authenticator, nearly, wrong)]
    if not -3 < found[0] < 3:
        found.append(_t_of(authenticator, nearly, wrong))
    assert -3 < found[-1] < 3, found


def _t_of(authenticator: Authenticator, first: Request, second: Request) -> float:
    samples: dict[int, list[float]] = {0: [], 1: []}
    order = [0, 1] * NUM_SAMPLES
    random.shuffle(order)
    for which in order:
        request = (first, second)[which]
        began = time.perf_counter_ns()
        authenticator.identify(request)
        samples[which].append(time.perf_counter_ns() - began)
    # What took ten times as long was interrupted, and says nothing of the comparison.
    limit = 10 * statistics.median(samples[0] + samples[1])
    kept = [[each for each in values if each < limit] for values in samples.values()]
    means = [statistics.fmean(values) for values in kept]
    errors = [statistics.variance(values) / len(values) for values in kept]
    return (means[0] - means[1]) / math.sqrt(sum(errors))
