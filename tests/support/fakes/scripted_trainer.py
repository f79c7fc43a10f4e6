"""Fine-tuning jobs of a live server whose training process is scripted by the test."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai

from engine.core.errors import InvalidRequestError
from engine.core.store.adapter_store import tenant_of
from engine.finetuning.folder import JobFolder, TrainingEvent
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.files.lora_files import peft_folder
from tests.support.servers.live_server import LiveServer, wait_until

HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make
LINES = [{"prompt": f"{word} is", "completion": f" {word}"} for word in "abcdefgh"]
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


class ScriptedTrainer:
    """Stands for `TrainerProcess`: does what the test says, and notes what is asked of it."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.status: int | None = None
        self.pid = 0
        STARTED.append(self)

    def exit_status(self) -> int | None:
        return self.status

    def hold(self) -> None:
        self.asked.append("hold")

    def go_on(self) -> None:
        self.asked.append("go_on")

    def pause(self) -> None:
        self.asked.append("pause")
        self.tell("paused")
        self.status = 0

    def kill(self) -> None:
        self.asked.append("kill")

    def tell(self, kind: Any, step: int = 1, **figures: Any) -> None:
        self.folder.tell(TrainingEvent(kind=kind, step=step, num_steps=4, **figures))

    def succeed(self) -> None:
        peft_folder(self.folder.adapter, SHAPES)
        self.tell("succeeded", 4)
        self.status = 0


STARTED: list[ScriptedTrainer] = []


class TunedBackend(FakeBackend):
    """Serves adapters, in so far as it notes them."""

    def reset(self, *words: Any) -> None:
        super().reset(*words)
        self.bases: dict[str, str | None] = {}
        self.refuses_adapters = False

    def files_of(self, model: str) -> Path | None:
        return Path("/models/base") if model == MODEL else None

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        if self.refuses_adapters:
            raise InvalidRequestError("no adapters here")
        self.bases[name] = base
        fields = {"root": MODEL, "parent": MODEL, "tenant": tenant_of(Path(path))}
        self.cards = [*self.cards, msgspec.structs.replace(CARD, id=name, **fields)]

    async def unload_adapter(self, name: str) -> None:
        del self.bases[name]
        self.cards = [card for card in self.cards if card.id != name]


def client_of(server: LiveServer, key: str = "unused") -> openai.OpenAI:
    base = f"{server.url}/v1"
    return openai.OpenAI(base_url=base, api_key=key, max_retries=0, http_client=HTTP)


def upload(client: openai.OpenAI, lines: list[Any], name: str = "train.jsonl") -> str:
    content = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=(name, content.encode()), purpose="fine-tune").id


def create(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "training_file": None} | fields
    given["training_file"] = given["training_file"] or upload(client, LINES)
    return client.fine_tuning.jobs.create(**given)


def trainer_of(job: Any, number: int = 0) -> ScriptedTrainer:
    def own() -> list[ScriptedTrainer]:
        return [each for each in STARTED if each.folder.path.name == job.id]

    wait_until(lambda: len(own()) > number)
    return own()[number]


def wait_for(client: openai.OpenAI, job: Any, status: str) -> Any:
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == status)
    return client.fine_tuning.jobs.retrieve(job.id)


def metric(server: LiveServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    (row,) = [each for each in text.splitlines() if each.startswith(f"engine_finetuning_{name} ")]
    return float(row.rpartition(" ")[2])
