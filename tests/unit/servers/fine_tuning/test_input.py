"""Bad input to /v1/fine_tuning/jobs is refused in a sentence, and the server is unharmed."""

from typing import Any

import openai
import pytest

from engine.servers.fine_tuning import store
from tests.support.fakes.scripted_trainer import HTTP, LINES, STARTED, create, upload
from tests.support.servers.live_server import LiveServer

PAIR = {
    "input": {"messages": [{"role": "user", "content": "Hi"}]},
    "preferred_output": [{"role": "assistant", "content": "Hello."}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}


@pytest.mark.parametrize(
    "lines, fields, param, said",
    [
        (
            [LINES[0], '{"prompt": '],
            {},
            "training_file",
            "line 2 of the training file: this is not JSON",
        ),
        ([PAIR], {}, "training_file", "line 1 of the training file: this is a preference"),
        (LINES, {"method": {"type": "dpo"}}, "training_file", "dpo needs input"),
        (["", ""], {}, "training_file", "the training file has no examples"),
        (LINES, {"model": "absent"}, "model", "'absent' can't be fine-tuned here"),
        (LINES, {"extra_body": {"lora": {"rank": 257}}}, "lora.rank", "256"),
        (LINES, {"extra_body": {"lora": {"rnk": 1}}}, "lora.rnk", ""),
        (LINES, {"training_file": "file-0"}, "training_file", "There is no such file"),
        (LINES, {"suffix": "a b"}, "suffix", "pattern"),
        (LINES, {"integrations": [{"type": "wandb"}]}, "integrations", "also not wandb"),
        (["x" * (5 * 2**20)], {}, "training_file", "line 1 of the training file has more than"),
        (
            LINES,
            {"hyperparameters": {"n_epochs": 0}},
            "hyperparameters.n_epochs",
            "n_epochs: should be auto, or an integer from 1 to 1000, got 0.",
        ),
        (LINES, {"method": {"type": "reinforcement"}}, "method.type", "supervised"),
    ],
)
def test_invalid_fine_tuning_requests_are_refused_with_an_explanation(
    client: openai.OpenAI, server: LiveServer, lines: Any, fields: Any, param: str, said: str
) -> None:
    given = {"training_file": upload(client, lines)} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **given)
    assert str(caught.value.param).startswith(param), caught.value
    message = caught.value.body["message"]
    assert said in message and "\n" not in message and "Traceback" not in message, message
    assert not STARTED and HTTP.get(f"{server.url}/health").status_code == 200


def test_jobs_beyond_the_limit_leave_no_folder(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OPEN_JOBS", 0)
    folders = server.services.settings.storage.directory / "fine_tuning"
    before = list(folders.glob("*"))
    with pytest.raises(openai.RateLimitError):
        create(client)
    assert list(folders.glob("*")) == before
