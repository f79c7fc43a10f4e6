"""What a child writes: cut into lines, bounded, and read for the reason of its end."""

import logging

import pytest

from engine.backends.external.child_logs import BURST_LINES, KEPT_LINES, MAX_LINE, ChildLog

VLLM_DEATH = """\
(APIServer pid=1) INFO 11-15 06:01:48 [api_utils.py:286] non-default args: {'model': 'x'}
(APIServer pid=1) WARNING 11-15 06:01:49 [utils.py:5] A limit may give `OSError: Too many files`.
(EngineCore pid=2) ERROR 11-15 06:02:00 [core.py:99] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-15 06:02:00 [core.py:99] ValueError: no room for the KV cache
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> ChildLog:
    return ChildLog("vllm", clock)


async def test_child_log_lines_are_prefixed_and_keep_their_level(log, caplog) -> None:
    output = log.begin()
    with caplog.at_level(logging.DEBUG):
        output.data_received(b"(W pid=1) WARNING 11-15 06:02:24 [cpu.py:1] tri")
        output.data_received("ton \N{GRINNING FACE}\nplain\n".encode())
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("WARNING", "[vllm] (W pid=1) WARNING 11-15 06:02:24 [cpu.py:1] triton \N{GRINNING FACE}"),
        ("INFO", "[vllm] plain"),
    ]


async def test_carriage_returns_of_a_progress_bar_split_lines(log) -> None:
    log.begin().data_received(b"Loading:  0%\rLoading: 50%\rLoading: 100%\r")
    assert log.last_line == "Loading: 100%"


async def test_the_first_error_line_is_the_cause_of_a_childs_end(log) -> None:
    output = log.begin()
    output.data_received(VLLM_DEATH.encode())
    assert log.cause == "ValueError: no room for the KV cache"


async def test_an_unrecognized_argument_is_reported_as_the_cause(log) -> None:
    output = log.begin()
    output.data_received(
        b"usage: vllm serve [-h]\nvllm serve: error: unrecognized arguments: --x=1\n"
    )
    assert log.cause == "error: unrecognized arguments: --x=1"


async def test_without_an_error_the_last_line_is_the_cause(log) -> None:
    output = log.begin()
    output.data_received(b"(E pid=2) INFO 11-15 06:03:44 [utils.py:347] Using a cache\nhalf a li")
    assert log.cause == "Using a cache"
    output.connection_lost(None)
    assert log.cause == "half a li"
    assert output.closed.done()


async def test_a_restarted_child_has_no_earlier_cause(log) -> None:
    log.begin().data_received(VLLM_DEATH.encode())
    log.begin()
    assert log.cause == "" and log.last_line == ""


async def test_a_flood_of_child_output_is_counted_and_its_end_kept(log, clock, caplog) -> None:
    num_lines = 2000
    output = log.begin()
    with caplog.at_level(logging.INFO):
        output.data_received("".join(f"noise {n}\n" for n in range(num_lines)).encode())
        assert len(caplog.records) == BURST_LINES
        assert log.last_line == f"noise {num_lines - 1}"
        clock.now += 1.0
        output.data_received(b"after\n")
    left_out = num_lines - int(BURST_LINES)
    assert f"{left_out} lines left out" in caplog.records[-2].getMessage()
    assert caplog.records[-1].getMessage() == "[vllm] after"


async def test_an_endless_output_line_is_truncated(log, caplog) -> None:
    output = log.begin()
    with caplog.at_level(logging.INFO):
        for _ in range(KEPT_LINES):
            output.data_received(b"x" * MAX_LINE)
    assert all(len(record.getMessage()) < MAX_LINE + 20 for record in caplog.records)
