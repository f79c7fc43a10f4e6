"""A backend with the real engine and a toy model: it starts at once, and its answers are letters.

The engine runs in a thread, or in a process that can be killed.
"""

from types import SimpleNamespace

import msgspec

from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.engine_settings import changed_options
from engine.core.parsing.output import OutputFormat
from engine.core.text.chat_template import ChatTemplate
from engine.frontend.engine_link import EngineLink
from engine.frontend.text_model import ChatFormat, TextModel
from engine.ipc.child_process import RestartPolicy
from engine.ipc.connection import EngineClient, InlineClient, ProcessClient
from engine.ipc.options import EngineOptions
from tests.support.toy_engine.runner import VOCAB

WORKER = "tests.support.toy_engine.worker"
LETTERS = [bytes([ord("a") + token]) for token in range(VOCAB)]
TOKENIZER = SimpleNamespace(
    eos_ids=(),
    drops_leading_space=False,
    chat_template=None,
    bytes_table=lambda skip_special, shown: LETTERS,
    token_literal=lambda token: LETTERS[token],
    is_special=lambda token: False,
)
CHAT = ChatFormat(ChatTemplate(None, "", ""), OutputFormat.of(None, {}))
TEXT = TextModel(
    SimpleNamespace(
        eos_ids=(),
        vocab_size=VOCAB,
        encoder=None,
        vision=None,
        hidden_size=VOCAB,
        max_position=256,
        num_params=1,
    ),
    TOKENIZER,
    CHAT,
    CHAT,
    None,
    0,
)


class ToyBackend(CustomBackend):
    framework = "toy"

    def __init__(self, *, in_process: bool = True, model_path: str = "toy", **settings) -> None:
        options = EngineOptions(model_path=model_path, framework="toy", **settings)
        super().__init__("toy", options=options)

        def make_client(on_message, on_exit) -> EngineClient:
            if in_process:
                return InlineClient(WORKER, options, on_message)
            return ProcessClient(WORKER, options, on_message, on_exit)

        max_revivals = 0 if in_process else options.max_revivals
        self._in_process = in_process
        self._link = EngineLink(
            make_client, RestartPolicy(), max_revivals=max_revivals, move=self._move
        )

    def remade(self, model, changes) -> "ToyBackend":
        fields = msgspec.structs.asdict(changed_options(self._options, model or "toy", changes))
        path = fields.pop("model_path")
        del fields["framework"]
        return ToyBackend(in_process=self._in_process, model_path=path, **fields)

    async def start(self) -> str:
        self._files = self._options.model_path
        await self._link.start()
        self._text = TEXT
        return "toy://"
