"""Shows what every layer of a model computes, and how long it takes, in any framework.

There are two ways. `served_outputs` and `served_times` use the model runner interface, so they work
with every framework, including third-party frameworks. They truncate the model after each layer
and read the hidden state that the LM head would get. A framework that can show more has an
`inspection.py` in its folder, with one or both of these functions:

    layer_outputs(source, token_ids) -> {site: float32 array of the tokens' values}
    layer_times(source, num_tokens, repeats) -> {layer: seconds of one call}

A site is a place in the model whose values are shown. `layer_outputs` has these sites:

    embed              (T, D)  input of the first layer
    layers.{i}.attn    (T, D)  what attention adds to the residual stream
    layers.{i}.mlp     (T, D)  what the MLP adds to the residual stream
    layers.{i}.out     (T, D)  the residual stream after the layer
    logits             (T, V)

`served_outputs` has these sites:

    served.layers.{i}  (T, D)      the residual stream after layer i, with the final norm applied
    served.logprobs    (T - 1,)    the logprob of each token after the first

`layer_times` has the layers embed, attn_norm, attn, mlp_norm, mlp, norm and head. `served_times`
has `block`, which is one whole layer, and `ends`, which is everything outside the layers.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.engine_settings import has_engine
from engine.core.errors import ConfigError, EngineError
from engine.core.registry.backend_registry import backend_names
from engine.runners.entry import framework_entry
from engine.runtime.model_runner import (
    BatchInputs,
    ModelRunner,
    RunnerConfig,
    SamplingInputs,
    StepOutput,
)
from engine.weights.files import FileBytes
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource

F32 = NDArray[np.float32]

_BLOCK = 16
_MAX_LOGITS = 128  # every runner can return this many rows of logits per step


@dataclass(frozen=True, slots=True)
class PartOfCheckpoint:
    """Some tensors of an opened checkpoint, which must stay open while this object is in use."""

    tensors: dict[str, LazyTensor]
    format: str

    @property
    def files(self) -> list[FileBytes]:
        # The files are larger than these tensors. None are listed, so that nothing takes the size
        # of the files for the size of the tensors.
        return []

    def close(self) -> None:
        pass


def frameworks(only: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """The registered frameworks that run on this machine, and for each framework that does not run,
    the reason. `only` restricts both to the given names.
    """
    here, missing = [], {}
    known = list(filter(has_engine, backend_names()))
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise ConfigError(f"no framework: {', '.join(unknown)}; there are {', '.join(known)}")
    for name in known if only is None else only:
        try:
            framework_entry(name).find_device("cpu", "float32")
        except (EngineError, ImportError) as error:
            missing[name] = str(error)
        else:
            here.append(name)
    return here, missing


def layer_outputs(framework: str, source: ModelSource, token_ids: Sequence[int]) -> dict[str, F32]:
    """All layer outputs that a framework can provide, as site -> values."""
    found = served_outputs(framework, source, token_ids)
    own = _own(framework, "layer_outputs")
    return found if own is None else own(source, token_ids) | found


def layer_times(
    framework: str, source: ModelSource, num_tokens: int, repeats: int
) -> dict[str, float]:
    """Seconds of one call of each layer, for a prefill of `num_tokens` tokens."""
    found = served_times(framework, source, num_tokens, repeats)
    own = _own(framework, "layer_times")
    return found if own is None else own(source, num_tokens, repeats) | found


def served_outputs(framework: str, source: ModelSource, token_ids: Sequence[int]) -> dict[str, F32]:
    assert len(token_ids) <= _MAX_LOGITS, f"at most {_MAX_LOGITS} tokens can be looked at"
    found: dict[str, F32] = {}
    for layer in range(source.config.num_layers):
        runner = float_runner(framework, first_layers(source, layer + 1), len(token_ids))
        with closing(runner):
            output = _step(runner, token_ids, every_token=True)
        assert output.hidden is not None and output.logprobs is not None, "both were asked for"
        found[f"served.layers.{layer}"] = output.hidden
        found["served.logprobs"] = output.logprobs[:-1]
    return found


def served_times(
    framework: str, source: ModelSource, num_tokens: int, repeats: int
) -> dict[str, float]:
    """Measures the time of a layer through the runner interface, in seconds. It is the difference
    between a model truncated to two layers and a model truncated to one layer.
    """
    tokens = np.random.default_rng(0).integers(0, source.config.vocab_size, num_tokens).tolist()
    parts = [first_layers(source, num_layers) for num_layers in (1, 2)]
    runners = [float_runner(framework, part, num_tokens) for part in parts]
    one, two = timed([lambda r=r: _step(r, tokens) for r in runners], repeats)  # type: ignore[misc]
    for runner in runners:
        runner.close()
    block = max(0.0, two - one)
    return {"block": block, "ends": max(0.0, one - block)}


def timed(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Calls each function `repeats` times. For each function, returns the median seconds of the
    faster half of its calls.

    The functions are called in turn, so that other load on the machine affects all of them equally.
    A first round is a warm-up, which is not measured.
    """
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, seconds in zip(calls, taken, strict=True):
            began = time.perf_counter()
            call()
            if turn > 0:
                seconds.append(time.perf_counter() - began)
    return [median(sorted(seconds)[: max(1, repeats // 2)]) for seconds in taken]


def first_layers(source: ModelSource, num_layers: int) -> ModelSource:
    """The model truncated after `num_layers` layers, with its final norm and head."""
    later = tuple(f"layers.{i}." for i in range(num_layers, source.config.num_layers))
    weights = {name: w for name, w in source.weights.items() if not name.startswith(later)}
    tensors = {tensor.name: tensor for weight in weights.values() for tensor in weight.tensors}
    return replace(
        source,
        path=source.path / f"first {num_layers} layers",
        config=replace(source.config, num_layers=num_layers),
        checkpoint=PartOfCheckpoint(tensors, source.checkpoint.format),
        weights=weights,
    )


def _own(framework: str, function: str) -> Callable[..., Any] | None:
    name = f"engine.{framework}.inspection"
    if find_spec(name) is None:
        return None
    found: Callable[..., Any] | None = vars(import_module(name)).get(function)
    return found


def float_runner(
    framework: str, source: ModelSource, num_tokens: int, num_logits: int = 1
) -> ModelRunner:
    """A runner in float32 for one sequence, with this many rows of logits in a step."""
    config = RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=_BLOCK,
        num_blocks=2 + num_tokens // _BLOCK,
        max_slots=num_logits,
        max_seq_len=min(source.config.max_position, num_tokens + 1),
        num_threads=None,
        max_batch_tokens=num_tokens,
    )
    runner: ModelRunner = framework_entry(framework).build_runner(source, config)
    return runner


def _step(runner: ModelRunner, token_ids: Sequence[int], every_token: bool = False) -> StepOutput:
    """Run all tokens in one step. With `every_token`, the output has the hidden state and the
    logprob at every token. Otherwise it has only those of the last token.
    """
    positions = np.arange(len(token_ids), dtype=np.int32)
    rows = positions if every_token else positions[-1:]
    inputs = whole_inputs(token_ids, rows)
    following = np.array([*token_ids[1:], 0], np.int32)[rows]
    return runner.sample(runner.forward(inputs), _scoring(following, every_token)).wait()


def whole_inputs(token_ids: Sequence[int], logit_rows: NDArray[np.int32]) -> BatchInputs:
    """A step that computes a whole sequence."""
    count = len(token_ids)
    positions = np.arange(count, dtype=np.int32)
    blocks = 1 + np.arange(-(-count // _BLOCK), dtype=np.int32)
    zero = np.zeros(1, np.int32)
    return BatchInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        # The slots are consecutive, because the block table is 1, 2, 3, ...
        write_slots=_BLOCK + positions.astype(np.int64),
        query_start=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        num_prompt=np.array([count], np.int32),
        block_tables=blocks[None],
        slots=zero,
        logit_rows=logit_rows,
        adapter_ids=zero,
        prefix_groups=np.full(1, -1, np.int32),
        prefix_blocks=np.zeros(0, np.int32),
    )


def _scoring(forced: NDArray[np.int32], wants_hidden: bool) -> SamplingInputs:
    """Sampling inputs with which the sampler returns the tokens `forced` and their logprobs,
    instead of sampling.
    """
    count = len(forced)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    none, indices = np.zeros(0, np.int32), np.arange(count, dtype=np.int32)
    same = np.zeros(count, np.int32)
    return SamplingInputs(
        sample_rows=same,
        slots=same,
        temperature=zeros,
        top_k=same,
        top_p=ones,
        min_p=zeros,
        repetition=ones,
        presence=zeros,
        frequency=zeros,
        bias_rows=none,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        seed=np.zeros(count, np.int64),
        choice=same,
        position=indices + 1,
        mask=None,
        forced=forced,
        hidden_rows=indices if wants_hidden else none,
        num_logprobs=same,
    )
