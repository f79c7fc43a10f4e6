"""Training: the losses are those of the papers, and interruptions do not change the adapter."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from engine.finetuning.adapter_model import load_for_training, micro_batches
from engine.finetuning.folder import JobFolder
from engine.finetuning.jobs import TrainingRequest, make_job
from engine.finetuning.losses import preference_loss, supervised_loss
from engine.finetuning.plan import Hyperparameters, LoraShape
from engine.finetuning.process import TrainerProcess
from engine.finetuning.tokens import TokenExample, TokenPair
from tests.live_server import wait_until
from tests.parity.tiny_models import make
from tests.tokenizer_files import byte_level_engine, write_directory

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
def model(base):
    made = load_for_training(base, SHAPE, CPU, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:  # B is zero in a new adapter
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def test_padding_does_not_change_the_supervised_loss(model):
    """Transformers' own loss, of one example at a time, is the reference."""
    batch = examples(9, 5, 14)
    reference = 0.0
    for example in batch:
        ids = torch.tensor([example.token_ids])
        labels = torch.where(torch.tensor([example.mask]), ids, -100)
        loss = model(input_ids=ids, labels=labels).loss.item()
        reference += loss * example.num_trained
    assert float(supervised_loss(model, batch)) == pytest.approx(reference, rel=1e-5)


def test_the_preference_loss_is_that_of_the_paper(model):
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
    loss = preference_loss(model, model.disable_adapter(), [TokenPair(first, second)], beta)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-4)


def test_parts_of_a_batch_stay_below_the_limit():
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

    def make_request(**changes):
        return TrainingRequest(
            base=base,
            training_file=file,
            validation_file=file,
            hyperparameters=Hyperparameters(n_epochs=6, batch_size=2),
            seed=7,
            threads=1,
            **({"lora": SHAPE} | changes),
        )

    return make_request


def run_to_the_end(folder):
    process = TrainerProcess(folder)
    try:
        wait_until(lambda: process.exit_status() is not None, 300)
        assert process.exit_status() == 0, (folder.path / "trainer.log").read_text()
    finally:
        process.kill()


def test_a_paused_and_killed_job_ends_as_an_undisturbed_one(tmp_path, request_of):
    whole, _ = make_job(request_of(), tmp_path / "whole")
    run_to_the_end(whole)
    events, _ = whole.events()
    losses = [event.loss for event in events if event.kind == "metrics"]
    assert len(losses) == 24 and losses[-1] < losses[0]
    assert [event.validation_loss is not None for event in events if event.kind == "metrics"] == (
        [False, False, False, True] * 6
    )
    assert events[-1].kind == "succeeded"

    broken, _ = make_job(request_of(), tmp_path / "broken")
    process = TrainerProcess(broken)
    try:
        wait_until(lambda: len(broken.events()[0]) > 3, 200)
        process.pause()
        wait_until(lambda: process.exit_status() is not None, 100)
        assert process.exit_status() == 0
    finally:
        process.kill()
    if broken.events()[0][-1].kind != "succeeded":  # it may have been quicker
        process = TrainerProcess(broken)
        os.kill(process.pid, signal.SIGKILL)
        process.kill()
        run_to_the_end(broken)
    found, wanted = (
        load_file(each.adapter / "adapter_model.safetensors") for each in (broken, whole)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


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


def test_a_failure_is_told_in_a_sentence(tmp_path, request_of):
    changed = request_of(lora=LoraShape(target_modules=("absent_proj",)))
    folder, _ = make_job(changed, tmp_path / "absent")
    process = TrainerProcess(folder)
    try:
        wait_until(lambda: process.exit_status() is not None, 200)
    finally:
        process.kill()
    events, _ = folder.events()
    assert events[-1].kind == "failed"
    assert events[-1].message.startswith("the adapter does not fit the model: ")


def test_half_a_line_of_events_waits_for_its_rest(tmp_path):
    folder = JobFolder(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"kind":"loading"}\n{"kind":"met')
    events, end = folder.events()
    assert [event.kind for event in events] == ["loading"]
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'rics","step":1}\n')
    events, _ = folder.events(end)
    assert [(event.kind, event.step) for event in events] == [("metrics", 1)]
