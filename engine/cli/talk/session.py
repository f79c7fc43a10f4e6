"""A conversation in the terminal: reads messages and commands, and prints answers."""

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.console import print_error
from engine.cli.machine_speed import speed_text
from engine.cli.talk.chat_clients import Talker
from engine.cli.talk.markdown import MarkdownPrinter
from engine.core.errors import ConfigError, EngineError, InvalidRequestError
from engine.core.interfaces.backend import Event, ReasoningEvent, TextEvent, UsageEvent
from engine.core.suggestions import suggest

try:
    import readline  # gives `input` arrow keys and history
except ImportError:  # some Python builds lack it
    readline = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from rich.console import Console

PROMPT, CONTINUED = "you> ", "...> "
# The control characters \x01 and \x02 enclose invisible text, which readline must not count in the
# width of the line.
COLOR = "\x01\x1b[1;32m\x02{}\x01\x1b[0m\x02 "
QUOTES = '"""'
# Command -> its argument and what it does.
COMMANDS = {
    "/help": ("", "show this list"),
    "/set": ("[NAME [VALUE]]", "show or set a sampling parameter, such as temperature 0.2"),
    "/system": ("[TEXT]", "show or set the system message"),
    "/model": ("[NAME]", "show the model, or change to another one"),
    "/retry": ("", "answer the last message again"),
    "/undo": ("", "take back the last message and its answer"),
    "/clear": ("", "forget the conversation; the system message stays"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a conversation from a file"),
    "/bye": ("", "end; Ctrl-D does the same"),
}
SYNONYMS = {"/exit": "/bye", "/quit": "/bye", "/reset": "/clear", "/?": "/help"}
HELP = "/help lists the commands, /bye or Ctrl-D ends the conversation."


class TalkSession:
    """`params` are sampling parameters by name. `reopen` opens another model by its name."""

    def __init__(
        self,
        console: "Console",
        talker: Talker,
        *,
        system: str | None,
        params: dict[str, Any],
        reopen: Callable[[str], Talker],
    ) -> None:
        self._console = console
        self._talker = talker
        self._params = params
        self._reopen = reopen
        self._system = system
        self._turns: list[dict[str, str]] = []

    def close(self) -> None:
        self._talker.close()

    def run(self) -> None:
        """Read and answer messages until the user ends the conversation."""
        self._say(f"{self._talker.name} is ready ({self._talker.place}). {HELP}")
        sampling = sampling_note({**self._talker.defaults, **self._params})
        self._say(f"Sampling: {sampling}; /set NAME VALUE changes it.")
        draft = ""
        while True:
            try:
                text = self._read(draft)
            except KeyboardInterrupt:
                draft = readline.get_line_buffer() if readline else ""
                self._console.print()
                if not draft:
                    self._say("/bye or Ctrl-D ends the conversation.")
                continue
            except EOFError:
                self._console.print()
                return
            draft = ""
            if text.startswith("/") and not text.startswith("//"):
                name, _, argument = text.partition(" ")
                if SYNONYMS.get(name, name) == "/bye":
                    return
                self._command(name, argument.strip())
            elif text.strip():
                self._ask(text.removeprefix("/") if text.startswith("//") else text)

    def _read(self, draft: str) -> str:
        """Read a message. Three quotes enclose several lines; a backslash continues a line."""
        text = self._line(PROMPT, draft).strip()
        if text.startswith(QUOTES):
            lines = [text.removeprefix(QUOTES)]
            while not lines[-1].endswith(QUOTES):
                lines.append(self._line(CONTINUED))
            return "\n".join(lines).removesuffix(QUOTES).strip("\n")
        while text.endswith("\\"):
            text = text.removesuffix("\\") + "\n" + self._line(CONTINUED).strip()
        return text

    def _line(self, prompt: str, draft: str = "") -> str:
        is_plain = self._console.no_color or not self._console.is_terminal
        if readline is not None:
            readline.set_startup_hook(lambda: readline.insert_text(draft))
        return input(prompt if is_plain else COLOR.format(prompt.strip()))

    def _ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        if not self._answer():
            self._turns.pop()

    def _answer(self) -> bool:
        """Print and keep the answer to the last message. Ctrl-C stops the answer; the text so far
        is kept. Returns False if the generation fails.
        """
        try:
            params = {**self._talker.defaults, **self._params}
            pieces = self._print(self._talker.stream(self._messages(), params))
        except EngineError as error:
            self._console.print()
            print_error(error)
            return False
        self._turns.append({"role": "assistant", "content": "".join(pieces)})
        return True

    def _print(self, events: Generator[Event]) -> list[str]:
        pieces: list[str] = []
        note, printer = "(cut short)", self._printer()
        try:
            for event in events:
                if isinstance(event, TextEvent):
                    pieces.append(event.text)
                    printer.feed(event.text)
                elif isinstance(event, ReasoningEvent):
                    self._console.print(event.text, end="", style="dim", markup=False)
                elif isinstance(event, UsageEvent):
                    note = usage_note(event)
        except KeyboardInterrupt:
            events.close()
        printer.close()
        self._console.print(f"\n[dim]{note}[/]", highlight=False)
        return pieces

    def _printer(self) -> MarkdownPrinter:
        self._console.print("[bold blue]model>[/] ", end="")
        return answer_printer(self._console, column=len("model> "))

    def _messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self._system}] if self._system else []
        return opening + self._turns

    def _command(self, name: str, argument: str) -> None:
        """Run a command. An unknown command is never sent to the model."""
        known = SYNONYMS.get(name, name)
        if known not in COMMANDS:
            self._say(f"{name} is no command{suggest(name, list(COMMANDS))}")
            self._say("To send it as a message, write //" + name.removeprefix("/"))
            return
        try:
            getattr(self, f"_do_{known.removeprefix('/')}")(argument)
        except EngineError as error:
            print_error(error)

    def _do_help(self, argument: str) -> None:
        for name, (takes, does) in COMMANDS.items():
            self._say(f"  {name + ' ' + takes:<24}{does}")
        self._say(f"  {QUOTES} encloses several lines; a \\ at the end of a line continues it")
        self._say("  Ctrl-C stops an answer, or keeps what you have typed as a draft")

    def _do_set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not value:
            known = {**self._talker.defaults, **self._params}
            shown = {name: known.get(name)} if name else known
            for key, each in shown.items():
                self._say(f"{key} = {'default' if each is None else each}")
            return
        changed = dict(self._params)
        changed.pop(name, None)
        if value.strip() != "default":
            changed[name] = read_value(value.strip())
        check_parameters(changed)
        self._params = changed
        self._say(f"{name} = {changed.get(name, 'default')}")

    def _do_system(self, argument: str) -> None:
        self._system = argument or self._system
        self._say(f"system message: {self._system or 'none'}")

    def _do_model(self, argument: str) -> None:
        if argument:
            talker = self._reopen(argument)  # the old model stays if this fails
            self._talker.close()
            self._talker = talker
        self._say(f"{self._talker.name} answers ({self._talker.place}).")

    def _do_retry(self, argument: str) -> None:
        if not self._turns:
            raise InvalidRequestError("there is no message to answer again")
        last = self._turns.pop()
        if last["role"] != "assistant":
            self._turns.append(last)
        if not self._answer():
            self._turns.append(last)

    def _do_undo(self, argument: str) -> None:
        if not self._turns:
            raise InvalidRequestError("there is no message to take back")
        while self._turns and self._turns.pop()["role"] != "user":
            pass
        self._say(f"{len(self._turns)} messages are left.")

    def _do_clear(self, argument: str) -> None:
        self._turns.clear()
        self._say("The conversation is forgotten.")

    def _do_save(self, argument: str) -> None:
        path = _path(argument, "/save")
        content = {
            "model": self._talker.name,
            "parameters": self._params,
            "messages": self._messages(),
        }
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}") from None
        self._say(f"{len(self._turns)} messages are in {path}.")

    def _do_load(self, argument: str) -> None:
        path = _path(argument, "/load")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            turns = [
                {"role": str(each["role"]), "content": str(each["content"])}
                for each in content["messages"]
            ]
            params = dict(content.get("parameters", self._params))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no saved conversation: {error}") from None
        check_parameters(params)
        self._params = params
        self._system = None
        if turns and turns[0]["role"] == "system":
            self._system = turns.pop(0)["content"]
        self._turns = turns
        self._say(f"{len(turns)} messages are loaded.")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def answer_printer(console: "Console", column: int = 0) -> MarkdownPrinter:
    """Prints an answer on a console: as Markdown on a terminal, otherwise unchanged."""

    def write(text: str) -> None:
        console.file.write(text)
        console.file.flush()

    styled = console.is_terminal and not console.no_color
    width = console.width if console.is_terminal else 10**9
    return MarkdownPrinter(write, width, styled=styled, column=column)


def usage_note(usage: UsageEvent) -> str:
    speed = ""
    if usage.decode_s:
        speed = f", {speed_text((usage.completion_tokens - 1) / usage.decode_s)} tok/s"
    return f"({usage.completion_tokens} tokens{speed}, {usage.cached_tokens} cached)"


def sampling_note(params: Mapping[str, Any]) -> str:
    """The sampling parameters in force, as a user would type them."""
    return ", ".join(f"{name} {value}" for name, value in params.items()) or "the server's defaults"


def read_value(text: str) -> Any:
    """The value of a parameter: JSON, or else text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def check_parameters(params: dict[str, Any]) -> None:
    """Raise an error if a sampling parameter is unknown or invalid."""
    from engine.sampling_params import make_params, wire_params

    wire_params(make_params(params))


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"write {command} FILE")
    return Path(argument).expanduser()
