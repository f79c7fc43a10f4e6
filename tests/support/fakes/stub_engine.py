"""A stub engine for a `Generation`: it records the calls it gets and does nothing."""


class ToldEngine:
    def __init__(self) -> None:
        self.forgotten: list[int | None] = []  # choices; None: the whole request
        self.left: list[object] = []  # the notes to which timelines are still to be added
        self.done_ids: list[str] = []

    def forget(self, request_id: str, choice: int | None) -> None:
        self.forgotten.append(choice)

    def leave(self, request_id: str, notes: object) -> None:
        self.left.append(notes)

    def num_revivals(self, request_id: str) -> int:
        return 0

    def done(self, request_id: str) -> None:
        self.done_ids.append(request_id)
