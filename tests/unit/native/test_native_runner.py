"""The native runner's own part, around a compiled model that only notes what it is given."""

from types import SimpleNamespace

import numpy as np

from engine.native.execution.runner import NativeRunner
from engine.runtime.model_runner import FROM_DEVICE, SAMPLE, RunnerSpec
from tests.parity.runner_driver import sampling_inputs

SPEC = RunnerSpec(16, 8, 4, 64, 10, 0)


class NotingModel:
    """Draws what it is told to."""

    def __init__(self) -> None:
        self.steps: list[tuple[np.ndarray, ...]] = []
        self.tokens = np.zeros(0, np.int32)

    def forward(self, *arrays: np.ndarray, **named: np.ndarray) -> None:
        *before, finite = arrays[:10]
        self.steps.append((*before, *arrays[10:]))
        self.named = named
        finite[:] = [1, 0, 1, 1][: len(finite)]

    def sample(self, sampling) -> tuple:
        return self.tokens, None, None, None

    def hidden(self, row: int, state: np.ndarray) -> None:
        state[:] = row

    def logits(self, row: int, values: np.ndarray) -> None:
        values[:] = 10 * row


def step(token_ids, query_start, slots, logit_rows) -> SimpleNamespace:
    names = ("positions", "write_slots", "num_prompt", "block_tables", "prefix_groups")
    given = {
        "token_ids": token_ids,
        "query_start": query_start,
        "slots": slots,
        "logit_rows": logit_rows,
    }
    arrays = {name: np.array(each, np.int32) for name, each in given.items()}
    names += ("prefix_blocks", "window_slots", "window_tables", "state_load", "state_save")
    names += ("visible_end", "embeds", "embed_rows")
    given = {name: name for name in names}
    return SimpleNamespace(**arrays, **given, taps=None, adapter_ids=np.zeros(1, np.int32))


def test_from_device_tokens_are_the_slots_last_sampled_tokens():
    model = NotingModel()
    runner = NativeRunner(model, SPEC, hidden_size=3)
    model.tokens = np.array([7, 8, 9], np.int32)
    handle = runner.forward(step([1, 2, 3], [0, 1, 2, 3], [3, 0, 2], [0, 1, 2]))
    forced = sampling_inputs(range(3), [3, 0, 2], [1, 1, 1], forced=[SAMPLE, SAMPLE, 9])
    runner.sample(handle, forced)
    ids = [FROM_DEVICE, 5, 6, FROM_DEVICE, FROM_DEVICE]
    runner.forward(step(ids, [0, 1, 3, 4, 5], [0, 1, 3, 2], []))
    # Slot 2's token was forced: it is none of its own.
    assert model.steps[1][0].tolist() == [8, 5, 6, 7, 0]


def test_batch_arrays_reach_the_compiled_model_in_order():
    model = NotingModel()
    NativeRunner(model, SPEC, hidden_size=3).forward(step([1, 2], [0, 2], [0], [1]))
    _, positions, slots, query_start, *rest = model.steps[0]
    assert (positions, slots, query_start.tolist()) == ("positions", "write_slots", [0, 2])
    prompt, tables, logit_rows, groups, blocks, *windowed = rest
    assert windowed == ["window_slots", "window_tables"]
    assert (prompt, tables, groups, blocks) == (
        *("num_prompt", "block_tables"),
        *("prefix_groups", "prefix_blocks"),
    )
    assert logit_rows.tolist() == [1]
    assert model.named.pop("slots").tolist() == [0]
    assert [model.named.pop(each) for each in ("taps", "captured", "adapter_ids")] == [None] * 3
    assert len(model.named) == 5 and all(name == value for name, value in model.named.items())


def test_hidden_states_and_logits_are_returned_for_the_requested_rows():
    model = NotingModel()
    runner = NativeRunner(model, SPEC, hidden_size=3)
    model.tokens = np.array([1, 2, 3], np.int32)
    handle = runner.forward(step([1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2]))
    assert runner.logits(handle)[:, 0].tolist() == [0, 10, 20]
    asked = sampling_inputs(range(3), [0, 1, 2], [1, 1, 1], hidden_rows=[2, 0])
    output = runner.sample(handle, asked).wait()
    assert output.hidden.tolist() == [[2.0] * 3, [0.0] * 3]
    assert output.finite.tolist() == [True, False, True]
    plain = runner.sample(handle, sampling_inputs(range(3), [0, 1, 2], [1, 1, 1])).wait()
    assert plain.hidden is None


def test_a_step_that_samples_nothing_still_reports_nonfinite_rows():
    runner = NativeRunner(NotingModel(), SPEC, hidden_size=3)
    handle = runner.forward(step([1, 2], [0, 1, 2], [0, 1], []))
    output = runner.sample(handle, sampling_inputs([], [], [])).wait()
    assert (output.tokens.tolist(), output.finite.tolist()) == ([], [True, False])
