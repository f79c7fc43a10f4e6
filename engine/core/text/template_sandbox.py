"""Runs Jinja chat templates, which come from model files and are untrusted. Jinja is used nowhere
else.

There are three defences besides Jinja's own sandbox. First, templates only reach an allow-list of
names. Second, every loop iteration, call, filter and test checks the CPU time, through hooks that
`Meter` inserts before compilation. But a time check can't interrupt a single C operation, such as
repeating a string or comparing nested lists. So, third, operations whose result can grow are
replaced by functions that check sizes first.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from engine.core.errors import InvalidRequestError, ModelFormatError

MAX_CPU_SECONDS = 0.25
# Max length of a rendered prompt. It equals the default limit of a request body
# (`server.body_limit_mb`). The context length is checked later, by the engine.
MAX_OUTPUT_CHARS = 1 << 23
# Max characters that the template writes in total. Text that passes through a macro or a block
# counts each time.
_MAX_EMITTED_CHARS = 1 << 25
_MAX_SOURCE_CHARS = 1 << 18
_MAX_STRING_CHARS = 1 << 23
_MAX_WEIGHT = 200_000  # max values in one list or mapping, including nested values
_MAX_RANGE = 100_000
_MAX_INT_BITS = 4096
_PLAIN_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,64}")

_FILTERS = (
    *("abs", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower"),
    *("map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select"),
    *("selectattr", "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique"),
    *("upper", "format"),
)
_STRING_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"),
        *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
        *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("swapcase", "title", "upper"),
    )
)


_FIELD = re.compile(r"[0-9]{0,3}|[A-Za-z][A-Za-z0-9_]{0,63}")
_PERCENT = re.compile(r"(%[sd%])")


class LimitExceeded(InvalidRequestError):
    """A template used more time, text or structure than rendering a prompt can need."""


def check_length(length: int) -> None:
    if length > _MAX_STRING_CHARS:
        raise LimitExceeded(
            f"The chat template built a string over {_MAX_STRING_CHARS} characters."
        )


def weight(value: Any) -> int:
    """The cost of comparing or printing `value`: one for each nested value, plus one per 64
    characters of text. Raises `LimitExceeded` if the cost is too high.
    """
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item) >> 6
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        total += 1
        if total + len(pending) > _MAX_WEIGHT:
            raise LimitExceeded("The chat template built a list or mapping that is too large.")
    return total


def checked(value: Any) -> Any:
    if isinstance(value, str):
        check_length(len(value))
    elif isinstance(value, (list, tuple, dict)):
        weight(value)
    return value


def join(separator: str, parts: Sequence[str]) -> str:
    check_length(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def replace(text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old) if count < 0 else min(count, text.count(old))
    check_length(len(text) + found * len(new))
    return text.replace(old, new, count)


def add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        check_length(len(left) + len(right))
        return left + right
    return checked(left + right)


def multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitExceeded("The chat template multiplies numbers that are too large.")
        return left * right
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int) and times > 0:
            check_length(len(sequence) * times)
            if not isinstance(sequence, str) and weight(sequence) * times > _MAX_WEIGHT:
                raise LimitExceeded("The chat template builds a list that is too large.")
    return left * right


def power(left: Any, right: Any) -> Any:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * abs(right) > _MAX_INT_BITS
    ):
        raise LimitExceeded("The chat template computes a number that is too large.")
    return left**right


def modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise LimitExceeded("The chat template formats with '%', which templates cannot use here.")
    return left % right


def bounded_range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > _MAX_RANGE:
        raise LimitExceeded(f"The chat template asks for a range of over {_MAX_RANGE} numbers.")
    return values


def center(text: str, width: int = 80) -> str:
    check_length(width)
    return text.center(width)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = width if isinstance(width, str) else multiply(" ", width)
    check_length(len(text) + (text.count("\n") + 1) * len(step))
    head, *rest = (text + "\n").splitlines() or [""]
    lines = [step + head if first else head]
    lines += [step + line if line or blank else line for line in rest]
    return "\n".join(lines)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise LimitExceeded("The chat template indents JSON by more than 16 spaces.")
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, _MAX_WEIGHT))
    weight(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class OwnList(list[Any]):
    """A list that the template has made. Only these lists may grow."""


def append(values: OwnList, value: Any) -> None:
    values.append(value)
    weight(values)


def strftime_now(layout: str) -> str:
    if not _PLAIN_DATE.fullmatch(layout):
        raise LimitExceeded("The chat template uses a date layout that templates cannot use here.")
    return datetime.now().strftime(layout)


class Budget:
    """Limits the CPU time and the written characters of one rendering. CPU time is used instead of
    wall time, so that a rendering does not fail because the machine is busy.
    """

    def __init__(self) -> None:
        self._start = time.thread_time()
        self._look_again = time.monotonic() + MAX_CPU_SECONDS
        self._emitted = 0

    def spend(self, chars: int = 0) -> None:
        self._emitted += chars
        if self._emitted > _MAX_EMITTED_CHARS:
            raise LimitExceeded(f"The chat template wrote over {_MAX_EMITTED_CHARS} characters.")
        now = time.monotonic()
        if now >= self._look_again:
            left = MAX_CPU_SECONDS - (time.thread_time() - self._start)
            if left <= 0:
                raise LimitExceeded(
                    f"The chat template took over {MAX_CPU_SECONDS * 1000:.0f} ms of CPU time."
                )
            self._look_again = now + left


def format_text(text: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """`str.format` for fields without attributes, items, conversions and layouts."""
    parts: list[str] = []
    num_taken = 0
    for before, field, layout, conversion in Formatter().parse(text):
        parts.append(before)
        if field is None:
            continue
        if layout or conversion or not _FIELD.fullmatch(field):
            raise LimitExceeded(
                f"The chat template formats with {{{field[:64]}}}, which it cannot."
            )
        if field and not field.isdigit():
            parts.append(_text(named[field]))
        else:
            parts.append(_text(args[int(field or num_taken)]))
            num_taken += not field
    return join("", parts)


def percent_format(text: str, *args: Any) -> str:
    """The filter `format`, for `%s` and `%d`."""
    pieces = _PERCENT.split(text)
    if any("%" in piece for piece in pieces[::2]) or pieces.count("%s") + pieces.count("%d") != len(
        args
    ):
        raise LimitExceeded("The chat template formats with a layout that it cannot use here.")
    values = iter(args)
    texts = ["%" if piece == "%%" else _text(next(values)) for piece in pieces[1::2]]
    return join("", [part for pair in zip(pieces[::2], [*texts, ""], strict=True) for part in pair])


def _text(value: Any) -> str:
    """`str(value)`, for types whose text can't be much longer than their size suggests. Other types
    are refused.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, dict)):
        weight(value)
    elif not isinstance(value, (Undefined, int, float, type(None))):
        raise LimitExceeded(f"The chat template prints a {type(value).__name__} object.")
    return str(value)


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 30:
        raise LimitExceeded("The chat template rounds to more than 30 digits.")
    return FILTERS["round"](value, precision, method)


def _raise_exception(message: Any = "") -> NoReturn:
    raise InvalidRequestError(
        f"The model's chat template refuses this conversation: {_text(message):.500}"
    )


class GenerationTag(Extension):
    """The tag `{% generation %}`. In training, it marks the text of the assistant. Here, it only
    renders its body.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Meter(NodeTransformer):
    """Inserts the hooks of the sandbox into the syntax tree of a template."""

    @staticmethod
    def _hook(name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=at.lineno)
        return nodes.Call(function, arguments, [], None, None, lineno=at.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = self._hook("tick", [], node)
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        size = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        charge = self._hook("tick", [nodes.Const(size, lineno=node.lineno)], node)
        return [nodes.ExprStmt(charge, lineno=node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("join_text", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("own_list", [node], node)

    def visit_Dict(self, node: nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return self._hook("checked", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_Dict(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        # Jinja compiles a slice to a plain Python subscript, which the sandbox does not check.
        if isinstance(node.arg, nodes.Slice):
            node.node = self._hook("checked", [node.node], node)
        return node

    def visit_Include(self, node: nodes.Node) -> NoReturn:
        raise jinja2.TemplateSyntaxError("a chat template cannot load other templates", node.lineno)

    visit_Import = visit_FromImport = visit_Extends = visit_Include


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Constant folding would run while the template is compiled. At that time no budget
            # limits it.
            optimized=False,
            finalize=_emit,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.thread = threading.local()
        guarded: dict[str, Callable[..., Any]] = {
            "tojson": to_json,
            "join": self._join_filter,
            "replace": lambda text, *args: replace(_text(text), *map(_replace_arg, args)),
            "string": _text,
            "indent": lambda text, *args, **named: indent(_text(text), *args, **named),
            "center": lambda text, width=80: center(_text(text), width),
            "round": _round,
            "format": percent_format,
            "sum": lambda items, attribute=None: FILTERS["sum"](self, items, attribute),
        }
        self.globals = {
            "range": bounded_range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }
        self.filters = {name: self._metered(guarded.get(name, FILTERS[name])) for name in _FILTERS}
        self.tests = {name: self._metered(test) for name, test in TESTS.items()}
        self.binop_table |= {
            "+": add,
            "*": multiply,
            "**": power,
            "%": modulo,
        }

    def _metered(self, function: Any) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return checked(function(*args, **kwargs))

        # Jinja sets this attribute on functions that take the environment or the context as their
        # first argument.
        if hasattr(function, "jinja_pass_arg"):
            metered.__dict__["jinja_pass_arg"] = function.jinja_pass_arg
        return metered

    def _join_filter(self, items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        return join(_text(d), [_text(item) for item in items])

    def tick(self, chars: int = 0) -> bool:
        self.thread.budget.spend(chars)
        return True

    def checked(self, value: Any) -> Any:
        return checked(value)

    def own_list(self, value: list[Any]) -> OwnList:
        weight(value)
        return OwnList(value)

    def join_text(self, *values: Any) -> str:
        return join("", [_text(value) for value in values])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, OwnList) and attr == "append":
            return True
        if isinstance(obj, (int, float)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(
            f"{attribute!r} of a {type(obj).__name__} is out of bounds"
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replaces `str.format` by our own function."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or value.__name__ != "format":
            return None
        return lambda *args, **named: format_text(owner, args, named)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        __self.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ == "replace":
            return replace(owner, *args)
        if isinstance(owner, str) and __obj.__name__ == "join":
            return join(owner, [_text(item) for item in args[0]])
        if isinstance(owner, OwnList) and __obj.__name__ == "append":
            return append(owner, *args)
        return checked(super().call(__context, __obj, *args, **kwargs))


def _replace_arg(value: Any) -> Any:
    return value if isinstance(value, int) else _text(value)


@jinja2.pass_context
def _emit(context: Context, value: Any) -> str:
    text = _text(value)
    _ENVIRONMENT.tick(len(text))
    return text


_ENVIRONMENT = _TemplateEnvironment()


class TemplateProgram:
    """A compiled template. Any thread may render it."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelFormatError(
                f"The chat template is over {_MAX_SOURCE_CHARS} characters long."
            )
        try:
            tree = Meter().visit(_ENVIRONMENT.parse(source))
            code = _ENVIRONMENT.compile(tree.set_environment(_ENVIRONMENT))
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelFormatError(f"The chat template does not compile: {error}.") from error
        self._template = jinja2.Template.from_code(_ENVIRONMENT, code, dict(_ENVIRONMENT.globals))

    def render(self, variables: Mapping[str, Any]) -> str:
        _ENVIRONMENT.thread.budget = Budget()
        try:
            return "".join(self._bounded(variables))
        except InvalidRequestError:
            raise
        except Exception as error:
            raise InvalidRequestError(
                f"The model's chat template cannot render this conversation: {error!s:.500}"
            ) from error

    def _bounded(self, variables: Mapping[str, Any]) -> Iterator[str]:
        size = 0
        context = self._template.new_context(dict(variables))
        for chunk in self._template.root_render_func(context):
            size += len(chunk)
            if size > MAX_OUTPUT_CHARS:
                raise LimitExceeded(
                    f"The rendered prompt is over {MAX_OUTPUT_CHARS} characters long."
                )
            yield chunk
