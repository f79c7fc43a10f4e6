"""Prefill and decode apart: prefill nodes compute long prompts, and decode engines go on with them.

A prefill node gets the prompt as a request for one token, which is dropped. When it has answered,
the request goes to a decode engine, which fetches the blocks directly from the node. If the node
refuses, is lost or is late, the decode engine computes the prompt. So no request fails because of a
prefill node. Meanwhile the request is held here.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.handover import PEERS, Handover, Prefilled, PrefillOutcome
from engine.core.interfaces.request import (
    UNSHARED,
    GenerateRequest,
    RequestNotes,
    SamplingParams,
    TokenDelta,
)
from engine.frontend.request_recovery import Engine, OpenRequest, OpenRequests, Receiver
from engine.routing.nodes.pooled import PooledEngine
from engine.routing.nodes.request_router import RequestRouter

FIRST_MIN_TOKENS = 512  # until handovers were measured
MIN_TOKENS, MAX_TOKENS = 64, 16384  # limits of what measurements lead to
MEMORY = 0.8  # weight of earlier measurements
# A prefill node is given up after this long, and this many times the expected time.
MIN_PATIENCE_S = 5.0
PATIENCE = 4.0
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
Give = Callable[[OpenRequest, str], None]


class PrefillCosts:
    """Knows from which length on a prompt is worth a handover. `min_tokens`, if given, is that.

    A handover costs the time to ask the node and to fetch the blocks. It saves the time to compute
    them. All of these are measured.
    """

    def __init__(self, min_tokens: int | None = None) -> None:
        self.min_tokens = min_tokens
        self._token_s: float | None = None  # to compute a token of a prompt
        self._asking_s = 0.0  # from asking a node to its answer, except for the computation

    def record(self, num_tokens: int, compute_s: float, total_s: float) -> None:
        token_s, asking_s = compute_s / max(1, num_tokens), max(0.0, total_s - compute_s)
        if self._token_s is None:
            self._token_s, self._asking_s = token_s, asking_s
            return
        self._token_s += (1 - MEMORY) * (token_s - self._token_s)
        self._asking_s += (1 - MEMORY) * (asking_s - self._asking_s)

    def threshold(self, fetch_s: float) -> int:
        """The least number of new tokens for a handover, if fetching one takes `fetch_s`."""
        if self.min_tokens is not None:
            return self.min_tokens
        if self._token_s is None:
            return FIRST_MIN_TOKENS
        gain_s = self._token_s - fetch_s
        if gain_s * MAX_TOKENS <= self._asking_s:
            return MAX_TOKENS
        return max(MIN_TOKENS, int(self._asking_s / gain_s))

    def patience_s(self, num_tokens: int) -> float:
        return MIN_PATIENCE_S + PATIENCE * (self._asking_s + num_tokens * (self._token_s or 0.01))


@dataclass(eq=False)
class Prefill:
    """A prompt at a prefill node. Receives the node's answer."""

    owner: "Prefills"
    request: GenerateRequest  # what the client asked for
    node: PooledEngine
    engine: Engine  # the link of the node
    num_new: int
    began_at: float = field(default_factory=time.monotonic)
    num_cached: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def own_id(self) -> str:
        return f"{self.request.request_id}:prefill"

    def question(self) -> GenerateRequest:
        return GenerateRequest(
            request_id=self.own_id,
            prompt=self.request.prompt,
            params=ONE_TOKEN,
            priority=self.request.priority,
            salt=self.request.salt,
            tenant=self.request.tenant,
            timeout_s=self.request.timeout_s,
            queue_timeout_s=self.request.queue_timeout_s,
            keeps_blocks=True,
            tells_begin=self.request.tells_begin,
        )

    def deliver(self, *items: TokenDelta | EngineError) -> None:
        for item in items:
            if isinstance(item, EngineError):
                self.owner.end(self, "lost")
                return
            if item.begins:
                self.owner.began(self)
            self.num_cached = max(self.num_cached, item.num_cached)
            self.queue_s = max(self.queue_s, item.queue_s)
            self.compute_s = max(self.compute_s, item.prefill_s)
            if item.finish_reason is not None:
                is_done = item.finish_reason in ("stop", "length")
                self.owner.end(self, "done" if is_done else "refused")


class Prefills:
    """Requests whose prompts are computed by prefill nodes, and what became of earlier ones.
    `give` lets a request go on in a decode engine.
    """

    def __init__(
        self,
        router: RequestRouter,
        max_revivals: int,
        min_tokens: int | None,
        give: Give,
    ) -> None:
        self._router = router
        self._give = give
        self._held = OpenRequests(max_revivals)
        self.nodes = 0  # the set of all prefill nodes
        self._alike: dict[str, int] = {}  # those of them whose blocks have the same identity
        self._under_way: dict[str, Prefill] = {}  # by the id of the client's request
        self.costs = PrefillCosts(min_tokens)
        self.outcomes: Counter[PrefillOutcome] = Counter()
        self.seconds = 0.0  # of all prompts that were computed

    def add(self, engine: PooledEngine) -> None:
        if engine.role == "prefill":
            self.nodes |= 1 << engine.number
            if engine.identity and engine.blocks is not None:
                known = self._alike.get(engine.identity, 0)
                self._alike[engine.identity] = known | 1 << engine.number

    def remove(self, engine: PooledEngine) -> None:
        self.nodes &= ~(1 << engine.number)
        self._alike = {each: some & self.nodes for each, some in self._alike.items()}

    def begin(self, request: GenerateRequest, receiver: Receiver, engine: PooledEngine) -> str:
        """Let a prefill node compute the prompt of a request that is meant for `engine`, if that is
        worthwhile. Returns the name of the node, or nothing.
        """
        alike = self._alike.get(engine.identity, 0) if engine.role == "decode" else 0
        if not alike or not _can_move(request):
            return ""
        threshold = self.costs.threshold(_fetch_s(engine))
        if len(request.prompt) < threshold:
            return ""
        num_new = len(request.prompt) - self._router.num_cached(engine.number, request)
        if num_new < threshold:
            return ""
        choice = self._router.route_request(request, alike)
        if choice is None:
            return ""
        node = self._router.engine(choice.engine)
        assert isinstance(node, PooledEngine)
        receiver.engine = self
        self._held.hold(request, receiver)
        prefill = Prefill(self, request, node, node.link, num_new)
        self._under_way[request.request_id] = prefill
        patience_s = self.costs.patience_s(num_new)
        prefill.timer = asyncio.get_running_loop().call_later(patience_s, self.end, prefill, "late")
        node.num_requests += 1
        try:
            node.link.submit(prefill.question(), prefill)
        except UnavailableError:  # it goes down at this moment
            self.end(prefill, "lost")
        return node.name

    def began(self, prefill: Prefill) -> None:
        """A node has started to compute the prompt. The client is notified; this may take long."""
        request_id = prefill.request.request_id
        if self._under_way.get(request_id) is prefill:
            self._held.deliver([TokenDelta(request_id, 0, begins=True)])

    def end(self, prefill: Prefill, outcome: PrefillOutcome) -> None:
        """A node has answered, or will not answer. The request continues in a decode engine."""
        if self._under_way.pop(prefill.request.request_id, None) is not prefill:
            return
        self._close(prefill, is_answered=outcome == "done")
        seconds = time.monotonic() - prefill.began_at
        self.outcomes[outcome] += 1
        source = None
        if outcome == "done":
            self.seconds += seconds
            self.costs.record(prefill.num_new, prefill.compute_s, seconds)
            source = prefill.node.blocks
        opened = self._held.release(prefill.request.request_id)
        if opened is None:
            return  # its time was over
        opened.come_back(prefill.queue_s)
        name = prefill.node.name
        done = Prefilled(name, outcome, seconds, prefill.num_cached)
        opened.request = msgspec.structs.replace(opened.request, handover=Handover(done, source))
        self._give(opened, _why(done))

    def _close(self, prefill: Prefill, is_answered: bool) -> None:
        if prefill.timer is not None:
            prefill.timer.cancel()
        if is_answered:
            prefill.engine.done(prefill.own_id)
        else:
            prefill.engine.forget(prefill.own_id, None)

    def release(self) -> list[OpenRequest]:
        """Give up all requests that are held, so that other engines can take them over."""
        for prefill in self._under_way.values():
            self._close(prefill, is_answered=False)
        self._under_way.clear()
        return self._held.release_all()

    def stop(self, error: EngineError) -> None:
        for prefill in self._under_way.values():
            self._close(prefill, is_answered=True)
        self._under_way.clear()
        self._held.fail(error)

    # What a receiver calls while its request is held

    def forget(self, request_id: str, choice: int | None) -> None:
        self._held.drop(request_id, choice)
        if choice is None and (prefill := self._under_way.pop(request_id, None)) is not None:
            self._close(prefill, is_answered=False)

    def leave(self, request_id: str, notes: RequestNotes) -> None:
        pass  # no decode engine has the request yet, so there is no timeline

    def num_revivals(self, request_id: str) -> int:
        return self._held.num_revivals(request_id)

    def done(self, request_id: str) -> None:
        self.forget(request_id, None)


def _fetch_s(engine: PooledEngine) -> float:
    """The mean time in which a decode engine fetches a token's part of a block."""
    stats = engine.link.stats
    for tier in () if stats is None else stats.tiers:
        if tier.name == PEERS and tier.saved_tokens:
            return tier.load_s / tier.saved_tokens
    return 0.0


def _can_move(request: GenerateRequest) -> bool:
    """Whether the blocks of a request may be used by another engine, and are of use there."""
    is_plain = request.adapter is None and request.interp is None and not request.images
    uses_cache = not (request.pools or request.params.score_prompt)
    is_shared = not request.salt.startswith(UNSHARED)
    return is_plain and uses_cache and is_shared and request.resumed is None


def _why(done: Prefilled) -> str:
    if done.outcome == "done":
        return f"{done.node} has computed its prompt"
    states = {"refused": "refused it", "lost": "was lost", "late": "was too slow"}
    return f"it computes the prompt itself, because {done.node} {states[done.outcome]}"
