"""An engine in this thread, for tests of interpretability requests."""

from pathlib import Path
from typing import Any

import numpy as np

from engine.core.interfaces.interp import Capture, Edit, InterpRequest
from engine.core.interfaces.request import Abort, GenerateRequest, SamplingParams, TokenDelta
from engine.core.interp.results import InterpResult
from engine.ipc.options import EngineOptions
from engine.tools.profiling import ListChannel
from engine.weights.model import open_model
from engine.worker.loading import load_runner
from engine.worker.main import build_loop, planned


class Answer:
    """The tokens of a request, and what it read."""

    def __init__(self, deltas: list[TokenDelta]) -> None:
        self.deltas = deltas
        self.tokens = [token for delta in deltas for token in delta.token_ids]
        self.logprobs = [each for delta in deltas for each in delta.logprobs or ()]
        last = deltas[-1]
        self.error = last.error_message if last.finish_reason == "error" else None
        self.error_code = last.error_code
        self.facts: dict[str, Any] = {}
        self.captured: dict[str, np.ndarray] = {}
        self.positions: dict[str, list[int]] = {}
        self.lens: list[dict[str, Any]] = []
        self.data = b"".join(each.captured for each in deltas if each.captured is not None)
        if last.captured is None:
            return
        result = InterpResult(self.data)
        self.facts, self.lens = result.facts, result.lens
        values = {
            name: np.frombuffer(each.data, np.float32).reshape(each.shape)
            for name, each in result.tensors.items()
        }
        for entry in [*self.facts["captures"], *self.facts.get("attention", ())]:
            self.captured[entry["site"]] = values[entry["tensor"]]
            self.positions[entry["site"]] = entry["positions"]


class ProbedEngine:
    def __init__(self, model: Path, framework: str, **options: Any) -> None:
        defaults = {"dtype": "float32", "max_seq_len": 128, "max_slots": 8}
        if framework != "jax":  # XLA chooses its threads
            defaults["threads"] = 2
        made = EngineOptions(model_path=str(model), framework=framework, **defaults | options)
        source = open_model(model)
        self.runner, _, plan = load_runner(source, planned(made))
        self.channel = ListChannel()
        self.loop = build_loop(
            self.runner, planned(made), plan.bytes_per_token, self.channel, source=source
        )
        source.close()

    def submit(self, *requests: GenerateRequest | Abort) -> None:
        self.channel.inbox.extend(requests)

    def run(self, *requests: GenerateRequest | Abort) -> dict[str, Answer]:
        self.channel.answers.clear()
        self.submit(*requests)
        self.loop.turn(0.0)
        while self.loop.scheduler.has_work:
            self.loop.turn(0.0)
        self.loop.turn(0.0)
        self.loop.scheduler.check()
        return self.answers()

    def run_when_loaded(self, each: GenerateRequest) -> Answer:
        """The answer to a request whose adapter must be loaded first."""
        self.channel.answers.clear()
        self.submit(each)
        while not any(d.finish_reason for _, m in self.channel.answers for d in m.deltas):
            self.loop.turn(0.001)
        return self.answers()[each.request_id]

    def answers(self) -> dict[str, Answer]:
        found: dict[str, list[TokenDelta]] = {}
        for _, message in self.channel.answers:
            for delta in message.deltas:
                found.setdefault(delta.request_id, []).append(delta)
        return {name: Answer(deltas) for name, deltas in found.items()}

    def close(self) -> None:
        self.runner.close()


def request(
    name: str,
    prompt: list[int],
    *,
    sites: tuple[str, ...] = (),
    edits: tuple[Edit, ...] = (),
    num_new: int = 1,
    logprobs: int | None = None,
    interp: InterpRequest | None = None,
    **changes: Any,
) -> GenerateRequest:
    if interp is None and (sites or edits):
        interp = InterpRequest(tuple(Capture(site) for site in sites), edits)
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, logprobs=logprobs)
    return GenerateRequest(
        request_id=name, prompt=tuple(prompt), params=params, interp=interp, **changes
    )
