"""The child process that test-compiles clients' grammars, isolated from the server.

The process keeps no state between grammars. Its memory, stack and CPU time are limited. A grammar
that exceeds a limit ends the process, and `GrammarChecker` starts another one. The module is run
with the parent's process id as its argument.
"""

import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from engine.core.grammar.limits import parser_limits
from engine.core.grammar.wire import LENGTH, Compile, Verdict, frame
from engine.core.sandbox.processes import die_with_parent

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_MEMORY_BYTES = 1 << 30
# This stack is smaller than that of any engine thread. So a grammar that compiles here can't
# overflow the stack in the engine.
MAX_STACK_BYTES = 2 << 20
# CPU time for one grammar, in seconds. The engine compiles the grammar a second time. Both
# compilations together should take less than 1 s.
MAX_CPU_S = 0.3
MAX_PROBLEM_CHARS = 300
END_OF_TEXT = 256
NOTHING_FOLLOWS = "NoExtensionBias"  # llguidance's error for a grammar that admits no first byte
EMPTY = "it admits no text at all"


class _Bytes:
    """A tokenizer with one token per byte, in the form that llguidance takes. It is sufficient for
    checking whether grammars compile.
    """

    eos_token_id = END_OF_TEXT
    bos_token_id = None
    special_token_ids = (END_OF_TEXT,)
    tokens = (*(bytes([value]) for value in range(END_OF_TEXT)), b"\xff<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def byte_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def problem_of(grammar: str, tokenizer: "LLTokenizer") -> str | None:
    """Describe in one line what is wrong with a grammar. Returns None if it compiles and some text
    matches it.
    """
    from llguidance import LLMatcher

    limits = parser_limits()
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return _one_line(matcher.get_error())
        mask = matcher.compute_bitmask()
    except BaseException as error:  # a Rust panic is not an Exception
        return _one_line(str(error) or type(error).__name__)
    if matcher.is_error():
        return _one_line(matcher.get_error())
    return None if any(mask) else EMPTY


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else "it does not compile"
    if line == NOTHING_FOLLOWS:
        return EMPTY
    return line if len(line) <= MAX_PROBLEM_CHARS else line[:MAX_PROBLEM_CHARS] + "..."


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    tokenizer = byte_tokenizer()
    verdict = Verdict()
    while True:
        answers.write(frame(verdict))
        answers.flush()
        header = requests.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return  # the parent is gone
        (length,) = LENGTH.unpack(header)
        request = msgspec.json.decode(requests.read(length), type=Compile)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends the process
        verdict = Verdict(problem_of(request.grammar, tokenizer))
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    for kind, limit in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    # Output printed by a library must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
