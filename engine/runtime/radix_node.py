"""The nodes of the prefix cache's radix tree."""

from engine.runtime.sequence import Tokens, packed


class Node:
    """A node of the tree, with the tokens and blocks of the edge that leads to it."""

    __slots__ = (
        "blocks",
        "children",
        "created",
        "expires_at",
        "last_used",
        "num_uses",
        "parent",
        "sides",
        "tenant",
        "tokens",
    )

    def __init__(
        self, tokens: Tokens, blocks: list[int], parent: "Node | None", tenant: str
    ) -> None:
        self.tokens = tokens
        self.tenant = tenant
        self.blocks = blocks
        # For each side column, one entry per block. NULL_BLOCK where the entry is missing.
        self.sides: tuple[list[int], ...] = ()
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # keyed by the token ids of their first block
        self.created = 0
        self.last_used = 0
        self.num_uses = 0
        self.expires_at: float | None = None


class Root(Node):
    """The root of one namespace's tree. A root without children is removed."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, tenant: str) -> None:
        super().__init__(packed(), [], None, tenant)
        self.namespace = namespace
