"""The real engine in this process, with random weights of a model's shape, sampled on the
device.
"""

from pathlib import Path
from typing import Any

from benchmarks.gpu.workloads import SHAPES, Workload
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.tools.profiling import DrivenEngine, Run
from engine.weights.model import ModelSource
from engine.weights.random import random_model


class BenchEngine(DrivenEngine):
    """Runs workloads; request ids are numbers."""

    def __init__(self, model: str, options: EngineOptions) -> None:
        super().__init__(shape_source(model), options)

    def run(self, workload: Workload, **params: Any) -> Run:
        return self.generate(requests_of(workload, **params))


def requests_of(workload: Workload, **params: Any) -> list[GenerateRequest]:
    """Greedy requests of fixed length."""
    return [
        GenerateRequest(
            request_id=str(number),
            prompt=tuple(prompt),
            params=SamplingParams(
                **{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
            ),
        )
        for number, (prompt, count) in enumerate(
            zip(workload.prompts, workload.num_new, strict=True)
        )
    ]


def tokens_of(run: Run, workload: Workload) -> list[list[int]]:
    """The generated tokens of each request."""
    tokens: list[list[int]] = [[] for _ in workload.prompts]
    for _, delta in run.answers:
        tokens[int(delta.request_id)].extend(delta.token_ids)
    return tokens


def shape_source(model: str) -> ModelSource:
    return random_model(SHAPES[model].config, Path(model))
