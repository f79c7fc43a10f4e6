"""One oracle for whole requests: whatever happens to an engine, each request gives what it gives
alone.

`requests` draws a request from all features at once, and `histories` what happens to the engines
that answer it. A level (`toy`, `tiny`) carries a history out on real engines. `results` compares
each whole result with that of the same request alone on a fresh engine, `efficiency` compares the
work with what the history needs, and `shrink` makes a failing history small.

    python -m tests.oracle --level toy --cases 1000 --seed 1
"""
