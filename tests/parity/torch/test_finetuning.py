"""Training: the losses are those of the papers, and interruptions do not change the adapter."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.core.errors import EngineError, InvalidRequestError, ResourceError
from engine.finetuning import trainer
from engine.finetuning.adapter_model import load_for_training, micro_batches
from engine.finetuning.folder import JobFolder, TrainingEvent
from engine.finetuning.jobs import TrainingRequest, make_job
from engine.finetuning.losses import base_log_probabilities, preference_loss, supervised_loss
from engine.finetuning.plan import Hyperparameters, LoraShape
from engine.finetuning.process import TrainerProcess
from engine.finetuning.tokens import TokenExample, TokenPair
from engine.finetuning.trainer import Trainer
from tests.parity.tiny_models import make
from tests.support.files.tokenizer_files import byte_level_engine, write_directory
from tests.support.servers.live_server import wait_until

CPU = torch.device("cpu")
SHAPE = LoraShape(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with a tokenizer."""
    folder = write_directory(tmp_path_factory.mktemp("tuned") / "base")
    size = byte_level_engine().get_vocab_size()
    make("llama", vocab_size=size).save_pretrained(folder)
    return folder


def examples(*lengths):
    made = []
    for seed, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed)
        ids = tuple(torch.randint(3, 60, (length,), generator=generator).tolist())
        made.append(TokenExample(ids, (False,) * 3 + (True,) * (length - 3)))
    return made


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    made = load_for_training(base, SHAPE, CPU, seed=0, scratch=tmp_path_factory.mktemp("scratch"))
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:  # B is zero in a new adapter
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def test_padding_does_not_change_the_supervised_loss(model):
    """Transformers' own loss, of one example at a time, is the reference."""
    batch = examples(9, 5, 14)
    reference, num_right = 0.0, 0
    for example in batch:
        ids = torch.tensor([example.token_ids])
        labels = torch.where(torch.tensor([example.mask]), ids, -100)
        answer = model(input_ids=ids, labels=labels)
        reference += answer.loss.item() * example.num_trained
        num_right += int((answer.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum())
    scores = supervised_loss(model, batch)
    assert float(scores.loss) == pytest.approx(reference, rel=1e-5)
    assert scores.num_right == num_right


def test_the_dpo_loss_equals_the_papers(model):
    first, second = examples(9, 7)
    beta = 0.3

    def log_probability(example):
        logits = model(input_ids=torch.tensor([example.token_ids])).logits[0].double()
        chosen = logits.log_softmax(-1)
        pairs = enumerate(zip(example.token_ids, example.mask, strict=True))
        return sum(float(chosen[at - 1, token]) for at, (token, is_on) in pairs if is_on)

    ratio = log_probability(first) - log_probability(second)
    with model.disable_adapter():
        ratio -= log_probability(first) - log_probability(second)
    wanted = -torch.nn.functional.logsigmoid(torch.tensor(beta * ratio))
    pair = TokenPair(first, second)
    base = base_log_probabilities(model, pair)[None]
    scores = preference_loss(model, [pair], base, beta)
    assert float(scores.loss) == pytest.approx(float(wanted), rel=1e-4)
    assert scores.margin == pytest.approx(beta * ratio, rel=1e-3)
    assert scores.num_right == (ratio > 0)


def test_the_dpo_reference_model_runs_without_dropout(model, monkeypatch):
    """It is kept for the whole job, and a job that continues computes it at another step."""
    pair = TokenPair(*examples(9, 7))
    wanted = base_log_probabilities(model, pair)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            monkeypatch.setattr(module, "attention_dropout", 0.5)
    model.train()
    try:
        assert torch.equal(base_log_probabilities(model, pair), wanted) and model.training
    finally:
        model.eval()


def test_micro_batches_stay_below_the_token_limit():
    parts = micro_batches([5, 100, 7, 7, 30], 60)
    assert sorted(index for part in parts for index in part) == [0, 1, 2, 3, 4]
    lengths = [5, 100, 7, 7, 30]
    for part in parts:
        padded = max(lengths[index] for index in part) * len(part)
        assert padded <= 60 or len(part) == 1


@pytest.fixture
def request_of(tmp_path, base):
    file = tmp_path / "train.jsonl"
    lines = [{"prompt": f"{word} a", "completion": f" b {word}"} for word in "abcdefgh"]
    file.write_text("\n".join(map(json.dumps, lines)))

    def make_request(n_epochs=6, **changes):
        return TrainingRequest(
            training_file=file,
            validation_file=file,
            hyperparameters=Hyperparameters(n_epochs=n_epochs, batch_size=2),
            seed=7,
            threads=1,
            **({"base": base, "lora": SHAPE} | changes),
        )

    return make_request


def test_a_paused_and_resumed_job_trains_the_same_adapter(tmp_path, request_of):
    whole, plan = make_job(request_of(), tmp_path / "whole")
    assert Trainer(whole, plan).run(lambda: False)
    events, _ = whole.events()
    losses = [event.loss for event in events if event.kind == "metrics"]
    assert len(losses) == 24 and losses[-1] < losses[0]
    assert [event.validation_loss is not None for event in events if event.kind == "metrics"] == (
        [False, False, False, True] * 6
    )
    assert events[-1].kind == "succeeded" and not list(whole.path.glob("scratch"))

    broken, plan = make_job(request_of(), tmp_path / "broken")
    for num_steps in (0, 3, 5):  # paused at the start, within an epoch, at the end of one
        asked = iter([False] * num_steps)
        assert not Trainer(broken, plan).run(lambda asked=asked: next(asked, True))
        assert broken.events()[0][-1].kind == "paused"
    assert [each.name for each in broken.checkpoints()] == ["step-00000008"]
    assert Trainer(broken, plan).run(lambda: False)
    found, wanted = (
        load_file(each.adapter / "adapter_model.safetensors") for each in (broken, whole)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_checkpoints_are_saved_by_time_and_old_ones_deleted(tmp_path, request_of):
    folder, plan = make_job(request_of(checkpoint_s=1e-9), tmp_path / "often")
    asked = iter([False] * 22)
    Trainer(folder, plan).run(lambda: next(asked, True))
    assert [each.name for each in folder.checkpoints()] == [
        f"step-{step:08d}" for step in (12, 16, 20)
    ]
    names = [each.name for each in (folder.path / "checkpoints").iterdir()]
    assert sorted(names)[-1] == folder.last_state().name == "within-00000022" and len(names) == 4
    folder.remove_state()
    names = [each.name for each in folder.path.rglob("*")]
    assert "optimizer.safetensors" not in names and names.count("adapter_model.safetensors") == 3


def test_dpo_increases_the_preference_margin_on_unseen_pairs(tmp_path, base):
    """The margin grows also on pairs that the job has not seen."""
    lines = [
        {
            "input": {"messages": [{"role": "user", "content": f"{word} or b"}]},
            "preferred_output": [{"role": "assistant", "content": "yes a"}],
            "non_preferred_output": [{"role": "assistant", "content": "no b"}],
        }
        for word in "abcdefghij"
    ]
    train, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    train.write_text("\n".join(map(json.dumps, lines[:8])))
    valid.write_text("\n".join(map(json.dumps, lines[8:])))
    request = TrainingRequest(
        base=base,
        training_file=train,
        validation_file=valid,
        method="dpo",
        hyperparameters=Hyperparameters(n_epochs=4, batch_size=4, learning_rate_multiplier=50.0),
        lora=SHAPE,
        seed=7,
    )
    folder, plan = make_job(request, tmp_path / "dpo")
    assert Trainer(folder, plan).run(lambda: False)
    events, _ = folder.events()
    steps = [event for event in events if event.kind == "metrics"]
    checked = [event for event in steps if event.validation_margin is not None]
    assert steps[0].margin == pytest.approx(0, abs=1e-4) and steps[-1].margin > 0.1
    assert steps[0].loss == pytest.approx(math.log(2), abs=1e-4) and steps[-1].accuracy == 1
    assert checked[-1].validation_margin > checked[0].validation_margin > 0
    assert checked[-1].validation_accuracy == 1


def test_the_training_process_ends_with_its_parent(tmp_path, request_of):
    folder, _ = make_job(request_of(), tmp_path / "orphan")
    code = (
        "import sys, time; from pathlib import Path;"
        "from engine.finetuning.folder import JobFolder;"
        "from engine.finetuning.process import TrainerProcess;"
        "print(TrainerProcess(JobFolder(Path(sys.argv[1]))).pid, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, str(folder.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()

    def is_gone():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone, 60)


def test_a_missing_base_model_is_named(tmp_path, base, request_of):
    moved = shutil.copytree(base, tmp_path / "moved")
    folder, plan = make_job(request_of(base=moved), tmp_path / "job")
    shutil.rmtree(moved)
    with pytest.raises(EngineError, match="moved"):
        Trainer(folder, plan)


def test_modules_that_the_model_lacks_are_named(tmp_path, request_of):
    changed = request_of(lora=LoraShape(target_modules=("absent_proj",)))
    folder, plan = make_job(changed, tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match="the adapter does not fit the model: .*absent"):
        Trainer(folder, plan)


def test_nonfinite_weights_end_the_job_with_an_explanation(tmp_path, base, request_of):
    broken = shutil.copytree(base, tmp_path / "nan")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    folder, plan = make_job(request_of(base=broken), tmp_path / "job")
    with pytest.raises(EngineError, match="the loss of step 1 is not finite"):
        Trainer(folder, plan).run(lambda: False)


def notices(folder):
    return [event.message for event in folder.events()[0] if event.kind == "notice"]


def test_a_step_that_exceeds_memory_is_split(tmp_path, request_of, monkeypatch):
    """Parts of a batch, and activations that are computed again, change no more than rounding."""
    whole, plan = make_job(request_of(n_epochs=2), tmp_path / "whole")
    assert Trainer(whole, plan).run(lambda: False)
    monkeypatch.setattr(trainer, "MICRO_BATCH_TOKENS", 32)
    monkeypatch.setattr(trainer, "_LEAST_TOKENS", 4)
    short, plan = make_job(request_of(n_epochs=2), tmp_path / "short")
    made = Trainer(short, plan)
    compute = made._scores

    def scores(part):
        if not made._recomputes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(part)

    made._scores = scores
    assert made.run(lambda: False)
    in_parts, again = notices(short)
    assert in_parts == "Memory is short: steps are computed in parts of 8 tokens."
    assert "computes activations again" in again
    found, wanted = (
        load_file(each.adapter / "adapter_model.safetensors") for each in (short, whole)
    )
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
    made = Trainer(*make_job(request_of(), tmp_path / "never"))
    made._scores = lambda part: torch.empty(2**50)  # PyTorch's own error of a CPU
    with pytest.raises(ResourceError, match="not enough memory for an example of . tokens"):
        made.run(lambda: False)


def test_a_model_that_exceeds_memory_is_not_loaded(tmp_path, request_of):
    with pytest.raises(
        ResourceError, match=r"needs more than .* may use 0 MiB \(finetuning.memory_mb\)"
    ):
        Trainer(*make_job(request_of(memory_bytes=4096), tmp_path / "small"))


def test_a_full_disk_loses_checkpoints_but_no_training_progress(tmp_path, request_of, monkeypatch):
    faults = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")]
    save, monkeys = trainer.save_adapter, iter(faults)

    def fail_twice(*given):
        for fault in monkeys:
            raise fault
        save(*given)

    def fail(*given):
        given[-1].joinpath("half").write_bytes(b"x")
        raise faults[1]

    monkeypatch.setattr(trainer, "save_adapter", fail_twice)
    monkeypatch.setattr(trainer, "save_state", fail)
    monkeypatch.setattr(trainer, "_RETRY_S", 0)
    folder, plan = make_job(request_of(n_epochs=2, checkpoint_s=1e-9), tmp_path / "full")
    assert Trainer(folder, plan).run(lambda: False)
    assert folder.events()[0][-1].kind == "succeeded" and folder.last_state() is None
    assert not list(folder.path.rglob("*.draft"))
    told = notices(folder)
    assert told[0] == "Step 1 has no checkpoint, which can't be written: No space left"
    assert [each for each in told if each.startswith("The adapter can't be written")] == told[-1:]


def test_a_job_continues_if_its_events_cannot_be_written(tmp_path, request_of):
    folder, plan = make_job(request_of(n_epochs=1, checkpoint_s=1e-9), tmp_path / "silent")
    tell = folder.tell

    def fail(event):
        if event.kind != "succeeded":
            raise OSError(errno.ENOSPC, "No space left on device")
        tell(event)

    folder.tell = fail
    assert Trainer(folder, plan).run(lambda: False)
    assert [event.kind for event in folder.events()[0]] == ["succeeded"] and folder.checkpoints()


def test_a_failed_event_write_leaves_no_partial_line(tmp_path, monkeypatch):
    folder, write = JobFolder(tmp_path), os.write
    folder.tell(TrainingEvent(kind="loading"))
    monkeypatch.setattr(os, "write", lambda number, text: write(number, text[:5]))
    with pytest.raises(OSError, match="No space left"):
        folder.tell(TrainingEvent(kind="metrics", step=1))
    monkeypatch.undo()
    folder.tell(TrainingEvent(kind="metrics", step=2))
    assert [event.step for event in folder.events()[0]] == [0, 2]


def test_a_failure_of_the_training_process_is_reported_as_an_event(tmp_path):
    folder = JobFolder(tmp_path)
    process = TrainerProcess(folder)
    try:
        wait_until(lambda: process.exit_status() is not None, 200)
    finally:
        process.kill()
    (event,) = folder.events()[0]
    assert event.kind == "failed" and "plan.json" in event.message


def test_an_incomplete_line_of_events_is_read_when_it_is_complete(tmp_path):
    folder = JobFolder(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"kind":"loading"}\n{"kind":"met')
    events, end = folder.events()
    assert [event.kind for event in events] == ["loading"]
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'rics","step":1}\n')
    events, _ = folder.events(end)
    assert [(event.kind, event.step) for event in events] == [("metrics", 1)]
