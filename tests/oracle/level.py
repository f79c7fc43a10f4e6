"""What a level gives to the oracle: a model, its texts, and what its requests can ask for."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from engine.core.parsing.output import OutputFormat
from engine.frontend.text_model import TextModel
from tests.oracle.asking import Content
from tests.oracle.engines import Parts
from tests.oracle.histories import Shape, Stage
from tests.oracle.requests import DrawnRequest


class Level(Protocol):
    name: str
    stage: Stage
    text: TextModel
    output: OutputFormat  # how the model writes reasoning and tool calls
    tolerance: float  # of logprobs and captured values
    max_seq_len: int
    max_follows: int  # tokens of a conversation that a request may continue
    redis: Callable[[], Any]  # connects to a Redis server whose data is lost

    def alone_in(self, shape: Shape) -> Shape:
        """The shape of the fresh engine on which a request of a history runs alone."""
        ...

    def parts(self, shape: Shape, longest: int) -> Parts:
        """What a new engine is made of. Its pool has room for a sequence of `longest` tokens."""
        ...

    def content(self, drawn: DrawnRequest, follows: tuple[int, ...]) -> Content:
        """The prompt and what else only the level understands. `follows` are the tokens that come
        before the prompt of the request.
        """
        ...

    def adapter_path(self, number: int) -> str | None:
        """Where an adapter is that an operator may load. None: there are none."""
        ...


def _toy() -> Level:
    from tests.oracle.toy import ToyLevel

    return ToyLevel()


def _tiny(framework: str, tolerance: float) -> Level:
    from tests.oracle.tiny import TinyLevel

    return TinyLevel(framework, tolerance)


# By name. A level loads its models when it needs them.
LEVELS: dict[str, Callable[[], Level]] = {
    "toy": _toy,
    "native": partial(_tiny, "native", 0.0),
    "torch": partial(_tiny, "torch", 1e-3),
}
