"""Fusion passes over a graph. Each pass replaces a pattern of nodes by fewer nodes that compute the
same result.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from engine.ir.attributes import (
    AttentionAttributes,
    Columns,
    Experts,
    Normalize,
    Projection,
    RopeWrite,
)
from engine.ir.graph import Graph, Node, Rewrite, joined_name
from engine.ir.plan import Activation

_MATMULS = ("linear", "projection")
_NORMS = ("rms_norm", "layer_norm")
_HEAD_NORMS = ("head_norm", "rms_norm")  # q and k are normalized per head, or over all heads
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_SUMS = (*_MATMULS, "experts")  # ops that can scale their result and add it to a residual stream


def fuse(graph: Graph) -> Graph:
    for fusion in PASSES:
        graph = fusion(graph)
    return graph


def fuse_positions(graph: Graph) -> Graph:
    """Fuses the sum of embed(tokens), position_embed(positions) and type_embed(token types) into
    one `embed_positions` node.
    """
    for op in ("position_embed", "type_embed"):
        graph = _fuse_table(graph, op)
    return graph


def _fuse_table(graph: Graph, op: str) -> Graph:
    edit = Rewrite(graph)
    for node in graph.nodes:
        if node.op != "add":
            continue
        tokens, places = (edit.made_by.get(name) for name in node.inputs)
        if tokens is None or places is None:
            continue
        if tokens.op == op:
            tokens, places = places, tokens
        pair = tokens.op in ("embed", "embed_positions") and places.op == op
        if pair and edit.private(tokens.name) and edit.private(places.name):
            parts = (tokens, places)
            inputs = tokens.inputs + places.inputs
            weights = tokens.weights + places.weights
            attributes = replace(tokens.attributes, types=op == "type_embed")
            fused = edit.node(
                "embed_positions", node.name, inputs, weights, attributes, (*parts, node)
            )
            edit.drop(parts)
            edit.put(node, fused)
    return edit.done()


def fuse_norms(graph: Graph) -> Graph:
    """Fuses a norm into the matmuls that follow it, if nothing else reads the norm's result."""
    edit = Rewrite(graph)
    for norm in graph.nodes:
        if norm.op not in _NORMS or norm.name in graph.outputs:
            continue
        users = edit.users.get(norm.name, [])
        if not users or any(user.op not in _MATMULS for user in users):
            continue
        assert isinstance(norm.attributes, Normalize)
        for user in users:
            attributes = replace(
                as_projection(user),
                norm="rms" if norm.op == "rms_norm" else "layer",
                norm_bias=len(norm.weights) > 1,
                eps=norm.attributes.eps,
            )
            weights = norm.weights + user.weights
            fused = edit.node(
                "projection", user.name, norm.inputs, weights, attributes, (norm, user)
            )
            edit.put(user, fused)
        edit.drop([norm])
    return edit.done()


def fuse_qkv(graph: Graph) -> Graph:
    """Fuses the three matmuls that compute a layer's q, k and v into one matmul, whose result is
    sliced.
    """
    edit = Rewrite(graph)
    for node in graph.nodes:
        if node.op != "attention":
            continue
        write = edit.maker(node.inputs[1], "kv_write")
        if write is None:
            continue
        chains = [_chain(edit, name) for name in (node.inputs[0], *write.inputs[1:3])]
        matmuls = [chain[-1] for chain in chains if chain and chain[-1].op in _MATMULS]
        if len(matmuls) != 3 or not _stackable(edit, matmuls):
            continue
        joined = joined_name([matmul.name for matmul in matmuls])
        fused = _stack(edit, joined, matmuls, matmuls)
        pieces, start = [], 0
        for matmul in matmuls:
            stop = start + _width(matmul)
            pieces.append(edit.node("columns", matmul.name, [joined], (), Columns(start, stop), ()))
            start = stop
        edit.drop(matmuls)
        edit.put(edit.first(matmuls), fused, *pieces)
    return edit.done()


def fuse_activations(graph: Graph) -> Graph:
    """Fuses activation(matmul) into a matmul with an activation epilogue."""
    return _fuse_epilogue(
        graph, _ACTIVATIONS, _MATMULS, lambda node: {"activation": _ACTIVATIONS[node.op]}
    )


def fuse_gates(graph: Graph) -> Graph:
    """Fuses activation(x @ gate) * (x @ up) into one gated matmul."""
    edit = Rewrite(graph)
    for node in graph.nodes:
        if node.op != "mul":
            continue
        sides = [edit.maker(name, *_MATMULS) for name in node.inputs]
        matmuls = [side for side in sides if side is not None]
        matmuls.sort(key=lambda matmul: as_projection(matmul).activation == "none")  # gate first
        if len(matmuls) != 2 or as_projection(matmuls[0]).activation == "none":
            continue
        gate, up = matmuls
        if not _is_bare(up) or not _stackable(edit, matmuls, up):
            continue
        fused = _stack(edit, node.name, matmuls, (*matmuls, node), gated=True)
        edit.drop(matmuls)
        edit.put(node, fused)
    return edit.done()


def fuse_scales(graph: Graph) -> Graph:
    """Fuses matmul * factor into a matmul with a scale epilogue, and likewise for experts."""
    return _fuse_epilogue(graph, ("scale",), _SUMS, lambda node: {"scale": node.attributes.factor})


def fuse_softcaps(graph: Graph) -> Graph:
    """Fuses softcap(matmul) into a matmul with a soft cap epilogue."""
    return _fuse_epilogue(
        graph, ("softcap",), _MATMULS, lambda node: {"softcap": node.attributes.cap}
    )


def _fuse_epilogue(
    graph: Graph,
    ops: Collection[str],
    makers: tuple[str, ...],
    epilogue: Callable[[Node], dict[str, Any]],
) -> Graph:
    """Fuses each node whose op is in `ops` into the node that makes its input, if that is one of
    `makers` and has no epilogue yet. `epilogue` gives the attributes to set.
    """
    edit = Rewrite(graph)
    for node in graph.nodes:
        if node.op not in ops:
            continue
        maker = edit.maker(node.inputs[0], *makers)
        if maker is None or not edit.private(maker.name) or not _is_bare(maker):
            continue
        attributes = replace(_sum_attributes(maker), **epilogue(node))
        fused = edit.node(
            _fused_op(maker), node.name, maker.inputs, maker.weights, attributes, (maker, node)
        )
        edit.drop([maker])
        edit.put(node, fused)
    return edit.done()


def fuse_rope_writes(graph: Graph) -> Graph:
    """Fuses the norms and RoPE of q and k, and the cache write of k and v, into `rope_write`."""
    edit = Rewrite(graph)
    for node in graph.nodes:
        if node.op != "attention":
            continue
        write = edit.maker(node.inputs[1], "kv_write")
        if write is None or not edit.private(write.name):
            continue
        chains = [_chain(edit, name) for name in (node.inputs[0], *write.inputs[1:3])]
        attributes = _rope_write(node.attributes, chains)
        if attributes is None:
            continue
        rotation = next((each for each in chains[0] if each.op == "rope"), None)
        inputs = chains[0][-1].inputs + (rotation.inputs[1:] if rotation else ())
        inputs += (write.inputs[0], write.inputs[3])
        norms = [each.weights[0] for chain in chains for each in chain if each.op in _HEAD_NORMS]
        replaced = [each for chain in chains for each in chain]
        name = f"{write.name}_rope"
        fused = edit.node("rope_write", name, inputs, norms, attributes, (*replaced, write))
        reads = (name, write.inputs[0], *node.inputs[2:])
        attend = edit.node("attention", node.name, reads, node.weights, node.attributes, (node,))
        edit.drop(replaced)
        edit.put(write, fused)
        edit.put(node, attend)
    return edit.done()


def _sums_in_place(
    graph: Graph, edit: Rewrite, node: Node, *ops: str
) -> Iterator[tuple[str, Node]]:
    """The ways in which `node` is a sum of x and what a node of these ops makes, if the sum may
    take the place of x: x, and that node.
    """
    if node.op != "add":
        return
    for kept, name in (node.inputs, node.inputs[::-1]):
        maker = edit.maker(name, *ops)
        if maker is None or not edit.private(name):
            continue
        if kept not in graph.inputs and edit.last_user(kept) is node:
            yield kept, maker


def fuse_residuals(graph: Graph) -> Graph:
    """Fuses x + matmul into a matmul that adds to x in place, if nothing reads x afterwards, and
    likewise for experts.
    """
    edit = Rewrite(graph)
    for node in graph.nodes:
        for kept, maker in _sums_in_place(graph, edit, node, *_SUMS):
            if not _is_bare(maker):
                continue
            attributes = replace(_sum_attributes(maker), residual=True)
            inputs = (*maker.inputs, kept)
            fused = edit.node(
                _fused_op(maker), node.name, inputs, maker.weights, attributes, (maker, node)
            )
            edit.drop([maker])
            edit.put(node, fused)
            break
    return edit.done()


def fuse_output_norms(graph: Graph) -> Graph:
    """Fuses x + norm(y) into a norm that adds to x in place, if nothing reads x afterwards."""
    edit = Rewrite(graph)
    for node in graph.nodes:
        for kept, norm in _sums_in_place(graph, edit, node, "rms_norm"):
            inputs = (*norm.inputs, kept)
            fused = edit.node(
                "add_norm", node.name, inputs, norm.weights, norm.attributes, (norm, node)
            )
            edit.drop([norm])
            edit.put(node, fused)
            break
    return edit.done()


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    fuse_positions,
    fuse_norms,
    fuse_qkv,
    fuse_activations,
    fuse_gates,
    fuse_scales,
    fuse_softcaps,
    fuse_rope_writes,
    fuse_residuals,
    fuse_output_norms,
)


def as_projection(node: Node) -> Projection:
    """The attributes of a matmul node, whether its op is `linear` or `projection`."""
    if isinstance(node.attributes, Projection):
        return node.attributes
    return Projection(has_bias=len(node.weights) > 1)


def _sum_attributes(node: Node) -> Projection | Experts:
    return node.attributes if isinstance(node.attributes, Experts) else as_projection(node)


def _fused_op(node: Node) -> str:
    return "experts" if node.op == "experts" else "projection"


def _is_bare(node: Node) -> bool:
    """Whether no gate, no residual and no activation has been fused into the node yet."""
    attributes = _sum_attributes(node)
    if isinstance(attributes, Experts):
        return not attributes.residual
    return not (attributes.gated or attributes.residual or attributes.activation != "none")


def _width(matmul: Node) -> int:
    width = matmul.value.shape[1]
    assert isinstance(width, int), matmul
    return width


def _stackable(edit: Rewrite, matmuls: Sequence[Node], like: Node | None = None) -> bool:
    """Whether the matmuls can become one matmul. For this, they must have the same input and the
    same norm, and exactly one node must use the result of each. With `like`, they must also have
    the same attributes as this matmul, apart from the activation.
    """
    model = like or matmuls[0]
    kind = replace(as_projection(model), parts=1, activation="none")
    norms = kind.norm_weights
    return all(
        edit.private(matmul.name)
        and matmul.inputs == model.inputs
        and matmul.weights[:norms] == model.weights[:norms]
        and replace(as_projection(matmul), activation="none") == kind
        for matmul in matmuls
    )


def _stack(
    edit: Rewrite,
    name: str,
    matmuls: Sequence[Node],
    replaces: Sequence[Node],
    gated: bool = False,
) -> Node:
    """One matmul that replaces several: its matrix has the rows of all their matrices. Norm and
    activation are those of the first matmul.
    """
    first = matmuls[0]
    norms = as_projection(first).norm_weights
    matrices = tuple(matmul.weights[norms] for matmul in matmuls)
    biases = tuple(bias for matmul in matmuls for bias in matmul.weights[norms + 1 :])
    attributes = replace(as_projection(first), parts=len(matmuls), gated=gated)
    weights = first.weights[:norms] + matrices + biases
    return edit.node("projection", name, first.inputs, weights, attributes, replaces)


def _chain(edit: Rewrite, name: str) -> list[Node]:
    """The nodes that compute the value `name`, which is q, k or v. The list starts with the last
    node and goes back to a matmul or to a slice of its result. The list is empty if a node outside
    the chain uses one of the values.
    """
    chain: list[Node] = []
    ops = ("rope", *_HEAD_NORMS, "columns", *_MATMULS)
    while (node := edit.maker(name, *ops)) is not None:
        if not edit.private(name):
            return []
        chain.append(node)
        if node.op in ("columns", *_MATMULS):
            break
        name = node.inputs[0]
    return chain


def _rope_write(attend: AttentionAttributes, chains: Sequence[list[Node]]) -> RopeWrite | None:
    """The attributes of a `rope_write` node that replaces the nodes in `chains`, which compute q, k
    and v. None if these nodes cannot be fused.
    """
    q_size, kv_size = attend.heads * attend.head_dim, attend.kv_heads * attend.head_dim
    wanted = (0, q_size, q_size + kv_size, q_size + 2 * kv_size)
    if any(not chain or chain[-1].op != "columns" for chain in chains):
        return None
    found = [chain[-1].attributes for chain in chains]
    if found != [Columns(*wanted[i : i + 2]) for i in range(3)]:
        return None
    if len({chain[-1].inputs for chain in chains}) != 1:
        return None
    norms = [each for chain in chains for each in chain if each.op in _HEAD_NORMS]
    orders = [["norm" if each in norms else each.op for each in chain[:-1]] for chain in chains]
    allowed: tuple[list[str], ...] = ([], ["rope"], ["norm"], ["rope", "norm"])
    rotations = {each.inputs[1:] for chain in chains for each in chain if each.op == "rope"}
    if any(order not in allowed for order in orders) or orders[2] or len(rotations) > 1:
        return None
    if ("rope" in orders[0]) != ("rope" in orders[1]):
        return None
    dims = {each.attributes.dim for chain in chains for each in chain if each.op == "rope"}
    kinds = {(each.op, each.attributes.eps) for each in norms}
    if len(dims) > 1 or len(kinds) > 1:
        return None
    return RopeWrite(
        attend.layer,
        attend.heads,
        attend.kv_heads,
        attend.head_dim,
        rope_dim=dims.pop() if dims else 0,
        q_norm="norm" in orders[0],
        k_norm="norm" in orders[1],
        eps=norms[0].attributes.eps if norms else 0.0,
        whole_norm=bool(norms) and norms[0].op == "rms_norm",
        table=next((each.attributes.table for each in chains[0] if each.op == "rope"), 0),
    )
