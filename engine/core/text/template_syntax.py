"""Adds hooks to the syntax tree of a chat template, before it is compiled. The hooks check CPU time
and sizes.
"""

from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


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
