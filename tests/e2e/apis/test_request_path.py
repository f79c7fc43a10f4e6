"""A streamed chat with a fresh prompt takes a short way: few files, none of unused features."""

from pathlib import Path

import pytest

from engine_tools.dev.trace_request import Trace, files, recorded
from tests.conftest import DEFAULT_MODEL

MOST_BEFORE_ENGINE = 25
MOST_FILES = 45  # with those of the engine process, and those that an idle server runs
# Parts of the paths of features that the chat does not use, in each of the processes.
SERVER_FEATURES = (
    *("beam", "adapters", "interp", "images", "token_fields", "token_streams", "stored_chats"),
    *("reports", "dialects", "schema/tools", "structured", "grammar", "quotas", "routing/"),
    *("embedding", "echo", "replay", "recorder", "tracing", "otel"),
)
ENGINE_FEATURES = (
    *("groups/", "tiers/", "interp/", "images", "grammar", "pending", "snapshot", "controls"),
    *("draft_model", "model_drafts", "prefill_throttle", "recovery", "chain", "prompt_logprobs"),
)


@pytest.fixture(scope="module")
def trace(default_model: Path) -> Trace:
    return recorded(DEFAULT_MODEL)


def test_a_chat_touches_few_files(trace: Trace) -> None:
    assert len(files(trace.before)) <= MOST_BEFORE_ENGINE, sorted(files(trace.before))
    assert len(files(trace.all)) <= MOST_FILES, sorted(files(trace.all))


def test_a_chat_touches_no_file_of_features_that_it_does_not_use(trace: Trace) -> None:
    server = [file for file in files(trace.server) if any(name in file for name in SERVER_FEATURES)]
    engine = [file for file in files(trace.engine) if any(name in file for name in ENGINE_FEATURES)]
    assert not server and not engine
