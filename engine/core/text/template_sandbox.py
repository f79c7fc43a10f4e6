"""The one place where Jinja runs: chat templates come from model files that nobody vouches for.

Three defences beside Jinja's own sandbox. What a template can reach is an allow-list. Every loop
turn, call, filter and test looks at the clock, by calls written into the syntax tree before it is
compiled. What runs between two looks is kept small by `template_limits`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from engine.core.text import template_limits as limits

_MAX_SOURCE_CHARS = 1 << 18

_FILTERS = (
    *("abs", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower"),
    *("map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select"),
    *("selectattr", "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique"),
    "upper",
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


def _text(value: Any) -> str:
    """`str(value)`, for the kinds of value whose text is bounded by their weight."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, dict)):
        limits.weight(value)
    elif not isinstance(value, (Undefined, int, float, type(None))):
        raise limits.LimitExceeded(f"The chat template prints a {type(value).__name__} object.")
    return str(value)


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 30:
        raise limits.LimitExceeded("The chat template rounds to more than 30 digits.")
    return FILTERS["round"](value, precision, method)


def _raise_exception(message: Any = "") -> NoReturn:
    raise InvalidRequestError(
        f"The model's chat template refuses this conversation: {_text(message):.500}"
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Writes the hooks of `_TemplateEnvironment` into a parsed template."""

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

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return self._hook("checked", [node], node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # compiled to a plain subscript, past the sandbox
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
            optimized=False,  # constants are computed on the budget of a rendering, not at load
            finalize=_emit,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.thread = threading.local()
        guarded: dict[str, Callable[..., Any]] = {
            "tojson": limits.to_json,
            "join": self._join_filter,
            "replace": lambda text, *args: limits.replace(_text(text), *map(_replace_arg, args)),
            "string": _text,
            "indent": lambda text, *args, **named: limits.indent(_text(text), *args, **named),
            "center": lambda text, width=80: limits.center(_text(text), width),
            "round": _round,
            "sum": lambda items, attribute=None: FILTERS["sum"](self, items, attribute),
        }
        self.globals = {
            "range": limits.bounded_range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": limits.strftime_now,
        }
        self.filters = {name: self._metered(guarded.get(name, FILTERS[name])) for name in _FILTERS}
        self.tests = {name: self._metered(test) for name, test in TESTS.items()}
        self.binop_table |= {
            "+": limits.add,
            "*": limits.multiply,
            "**": limits.power,
            "%": limits.modulo,
        }

    def _metered(self, function: Any) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return limits.checked(function(*args, **kwargs))

        # Jinja marks a function that wants the environment or the context by this attribute.
        if hasattr(function, "jinja_pass_arg"):
            metered.__dict__["jinja_pass_arg"] = function.jinja_pass_arg
        return metered

    def _join_filter(self, items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        return limits.join(_text(d), [_text(item) for item in items])

    def tick(self, chars: int = 0) -> bool:
        self.thread.budget.spend(chars)
        return True

    def checked(self, value: Any) -> Any:
        return limits.checked(value)

    def join_text(self, *values: Any) -> str:
        return limits.join("", [_text(value) for value in values])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, (int, float)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(
            f"{attribute!r} of a {type(obj).__name__} is out of bounds"
        )

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would offer its own `str.format`; here it is not among the string methods."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        __self.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ == "replace":
            return limits.replace(owner, *args)
        if isinstance(owner, str) and __obj.__name__ == "join":
            return limits.join(owner, [_text(item) for item in args[0]])
        return limits.checked(super().call(__context, __obj, *args, **kwargs))


def _replace_arg(value: Any) -> Any:
    return value if isinstance(value, int) else _text(value)


@jinja2.pass_context
def _emit(context: Context, value: Any) -> str:
    text = _text(value)
    _ENVIRONMENT.tick(len(text))
    return text


_ENVIRONMENT = _TemplateEnvironment()


class TemplateProgram:
    """A compiled template. Rendering is safe from any thread."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelFormatError(
                f"The chat template is over {_MAX_SOURCE_CHARS} characters long."
            )
        try:
            tree = _Meter().visit(_ENVIRONMENT.parse(source))
            code = _ENVIRONMENT.compile(tree.set_environment(_ENVIRONMENT))
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelFormatError(f"The chat template does not compile: {error}.") from error
        self._template = jinja2.Template.from_code(_ENVIRONMENT, code, dict(_ENVIRONMENT.globals))

    def render(self, variables: Mapping[str, Any]) -> str:
        _ENVIRONMENT.thread.budget = limits.Budget()
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
            if size > limits.MAX_OUTPUT_CHARS:
                raise limits.LimitExceeded(
                    f"The rendered prompt is over {limits.MAX_OUTPUT_CHARS} characters long."
                )
            yield chunk
