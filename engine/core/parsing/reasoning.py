"""Reasoning between `<think>` and `</think>`, before the answer.

Some templates open the block in the prompt, so that the model writes only its end; `opens` tells.
White space at the start of the reasoning and right behind its end is no part of either. Without a
block all is answer; an end tag that nothing opened stays text, since what came before it has
already been given out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.parsing.grammars import marker, with_inner
from engine.core.parsing.source import Source, Steps

OPEN, CLOSE = "<think>", "</think>"
_NO_CONTROL: Mapping[str, int] = {}


@dataclass(frozen=True)
class ReasoningFormat:
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def opens(self, prompt_tail: str) -> bool:
        """Whether a rendered prompt ends inside an open block."""
        return prompt_tail.rstrip().endswith(OPEN)

    def parse(self, source: Source, opened: bool) -> Steps[None]:
        """Read the reasoning, if there is any."""
        if not opened:
            yield from source.skip_space()
            if not (yield from source.starts_with(OPEN)):
                return
            source.take(len(OPEN))
            source.discard()
        source.reason(True)
        yield from source.skip_space()
        source.discard()
        ends = yield from source.text_until(CLOSE)
        source.reason(False)
        if ends:
            source.take(len(CLOSE))
            yield from source.skip_space()
            source.discard()


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The format of a model whose template knows reasoning."""
    source = template or ""
    return ReasoningFormat() if OPEN in source or CLOSE in source else None


def with_reasoning(grammar: str, opened: bool, control: Mapping[str, int] = _NO_CONTROL) -> str:
    """Free reasoning, then what `grammar` asks for. If the prompt did not open the block, the model
    may do so, or not reason at all.
    """
    opening = "" if opened else marker(OPEN, control)
    closing = marker(CLOSE, control)
    lines = ["%llguidance {}", r"SPACE: /[ \n]{0,2}/"]
    lines.append("start: thought SPACE @visible" if opened else "start: (thought SPACE)? @visible")
    if closing.startswith("<["):
        lines.append(f"thought: {opening} /(.|\\n)*/ {closing}")
    elif opening.startswith("<["):
        lines += [f"thought: {opening} rest", f"rest[lazy]: /(.|\\n)*/ {closing}"]
    else:
        lines.append(f"thought[lazy]: {opening} /(.|\\n)*/ {closing}")
    return with_inner("\n".join(lines) + "\n", grammar, "visible")
