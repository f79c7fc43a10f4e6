"""Requests that have no sequences yet, because they wait for something: their grammar is being
compiled, their images are not all encoded, or their adapter has no place.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    RequestTimeoutError,
)
from engine.core.interfaces.request import GenerateRequest
from engine.runtime.requests.grammar import Grammars
from engine.runtime.requests.images import (
    ImageAccount,
    ImageStore,
    PlacedImage,
    PromptImages,
    placed_tokens,
)
from engine.runtime.sequence import Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.runtime.groups.adapter_slots import AdapterSlots

log = logging.getLogger(__name__)


class PendingRequest(msgspec.Struct, frozen=True):
    request: GenerateRequest
    prompt: Tokens
    choices: list[int]  # indices of the choices that were not aborted
    matcher: "Future[LLMatcher] | None"
    submitted_at: float
    images: list[PlacedImage] = msgspec.field(default_factory=list)  # those that are encoded

    @property
    def lacks_image(self) -> bool:
        return len(self.images) < len(self.request.images)

    @property
    def is_ready(self) -> bool:
        """Whether grammar and images are ready."""
        return (self.matcher is None or self.matcher.done()) and not self.lacks_image


class ReadyRequest(msgspec.Struct, frozen=True):
    """A request that can be queued, with all that it waited for."""

    request: GenerateRequest
    prompt: Tokens
    choices: list[int]
    submitted_at: float
    matcher: "LLMatcher | None" = None
    images: tuple[PlacedImage, ...] = ()
    adapters: "AdapterSlots | None" = None  # if it has an adapter, which has this place
    place: int = 0


class PendingRequests:
    """The requests that wait, and what they wait for. `queued_images` are the images of those that
    wait no longer.
    """

    def __init__(
        self,
        queued_images: PromptImages,
        grammars: Grammars | None,
        images: ImageStore | None,
        make_adapters: "Callable[[], AdapterSlots] | None",
    ) -> None:
        self.requests: dict[str, PendingRequest] = {}
        self._queued_images = queued_images
        self._grammars = grammars
        self._images = images
        self._account = None if images is None else ImageAccount(images)
        self._make_adapters = make_adapters
        self.adapters: AdapterSlots | None = None  # made when the first one is used

    def find_lack(self, request: GenerateRequest) -> EngineError | None:
        """An error if the request needs what this engine does not have, or has no room for."""
        if request.grammar is not None and self._grammars is None:
            return InvalidRequestError("This engine follows no grammars.")
        if request.adapter is not None and self.with_adapters() is None:
            return InvalidRequestError("This engine serves no LoRA adapters.", param="model")
        if request.images and self._images is None:
            return InvalidRequestError("This engine does not read images.")
        if request.images and self._account is not None:
            return self._account.find_fault(request, self._held(self._account))
        return None

    def add(self, request: GenerateRequest, prompt: Tokens, choices: list[int], now: float) -> None:
        matcher = None
        if request.grammar is not None:
            assert self._grammars is not None
            matcher = self._grammars.compile(request.grammar)
        self.requests[request.request_id] = PendingRequest(request, prompt, choices, matcher, now)

    def take(self, now: float) -> Iterator[tuple[PendingRequest, ReadyRequest | EngineError]]:
        """Remove the requests that wait no longer, each with what can be queued, or with the error
        that ends it.
        """
        if self.adapters is not None:
            self.adapters.begin_pass()
        for each in list(self.requests.values()):
            ready: ReadyRequest | EngineError | None
            try:
                ready = self._ready(each, now)
            except EngineError as error:
                ready = error
            except Exception:  # such as a lack of memory on the device
                log.exception("request %s could not be made ready", each.request.request_id)
                ready = InferenceError("The engine could not take in this request.")
            if ready is not None:
                del self.requests[each.request.request_id]
                yield each, ready

    def _ready(self, pending: PendingRequest, now: float) -> ReadyRequest | None:
        """None: the request still waits."""
        request, timeout_s = pending.request, pending.request.timeout_s
        place = self._place(request) if pending.is_ready else None
        if place is None:
            if timeout_s is not None and now > pending.submitted_at + timeout_s:
                raise RequestTimeoutError("The request's time limit passed before it began.")
            return None
        return ReadyRequest(
            request,
            placed_tokens(pending.prompt, pending.images),
            pending.choices,
            pending.submitted_at,
            matcher=None if pending.matcher is None else pending.matcher.result(),
            images=tuple(pending.images),
            adapters=None if request.adapter is None else self.adapters,
            place=place,
        )

    def _place(self, request: GenerateRequest) -> int | None:
        """The place of the request's adapter. None: the request must wait for it."""
        if request.adapter is None:
            return 0
        assert self.adapters is not None, "`find_lack` made it"
        return self.adapters.place(request.adapter)

    def with_adapters(self) -> "AdapterSlots | None":
        """The places of LoRA adapters. None if the runner does not compute adapters."""
        if self.adapters is None and self._make_adapters is not None:
            self.adapters = self._make_adapters()
        return self.adapters

    @property
    def has_images(self) -> bool:
        """Whether an image waits to be encoded."""
        return any(each.lacks_image for each in self.requests.values())

    def encode_image(self) -> PendingRequest | None:
        """Encode the next image of the request that waits longest. Returns the request if this
        failed.
        """
        pending = next((each for each in self.requests.values() if each.lacks_image), None)
        if pending is None or self._images is None:
            return None
        request, image = pending.request, pending.request.images[len(pending.images)]
        try:
            pending.images.append(self._images.place(image, request.prompt[image.start]))
        except Exception:
            log.exception("an image of request %s could not be encoded", request.request_id)
            return pending
        return None

    def _held(self, account: ImageAccount) -> Iterable[tuple[str, int]]:
        """The tenant and the bytes of each request with images that has not ended."""
        for each in self.requests.values():
            yield each.request.tenant, account.needed(each.request.images)
        yield from self._queued_images.bytes_held()
