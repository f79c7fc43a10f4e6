"""Which family a model belongs to, by its chat template's source.

A template whose way of calling we can't read is treated as one that knows no tools: they are then
described in a message, and calls are asked for as plain JSON.
"""

import re

from engine.core.parsing.base import ToolFormat
from engine.core.parsing.generic_json import GenericJsonFormat
from engine.core.parsing.hermes import HermesFormat
from engine.core.parsing.llama3 import Llama3Format
from engine.core.parsing.mistral import MistralFormat

# Calls in these are not JSON, whatever markers stand around them.
_FOREIGN = ("<function=", "<arg_key>", "<parameter=")
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")
# A name and arguments in JSON that the template shows to the model, quoted or escaped.
_SHOWN_CALL = re.compile(r"name[\\\"']+ ?:.{0,200}?arguments[\\\"']+ ?:", re.DOTALL)


def tool_format(template: str | None) -> ToolFormat:
    source = template or ""
    has_system = not source or "system" in source
    uses_tools = any(_TOOLS.search(code) for code in _CODE.findall(source))
    if any(mark in source for mark in _FOREIGN):
        return GenericJsonFormat(False, has_system)
    if "[TOOL_CALLS]" in source:
        return MistralFormat(uses_tools, has_system, has_args_marker="[ARGS]" in source)
    if "<tool_call>" in source:
        return HermesFormat(uses_tools, has_system)
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and uses_tools):
        return Llama3Format(uses_tools, has_system)
    return GenericJsonFormat(uses_tools and bool(_SHOWN_CALL.search(source)), has_system)
