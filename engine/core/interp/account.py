"""The memory account of one interpretability request: what it would take, before it takes it."""

from engine.core.errors import InvalidRequestError

SETTING = "interp.max_capture_mb"


class Account:
    """Adds up what a request reads, changes and sends back, in bytes. It is refused by `check` if
    that is more than it may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.parts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def add(self, part: str, num_bytes: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + num_bytes

    def check(self) -> None:
        if self.total <= self.max_bytes:
            return
        largest = sorted(self.parts.items(), key=lambda each: -each[1])[:3]
        told = ", ".join(f"{part} {num_bytes:,}" for part, num_bytes in largest if num_bytes)
        raise InvalidRequestError(
            f"interp: the request would take {self.total:,} bytes ({told}), and may take"
            f" {self.max_bytes:,} ({SETTING}); ask for fewer sites, positions, layers, heads or"
            " vectors.",
            param="interp",
        )
