"""The memory account of a request in the engine, from its shape alone."""

from engine.architectures.sites import Site
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.interp import Capture, InterpRequest
from engine.core.interp.account import Account

# Upper bounds of what an entry of a result has as JSON text
_POSITION, _TOKEN, _ENTRY, _SHARE, _FEATURE = 10, 12, 640, 192, 80
_FACTS = 4096
# Input x gradient keeps the activations and the attention weights of all layers.
MAX_GRADIENT_BYTES = 2 * 2**30
# Rows of the LM head that a lens computes. Each costs about as much as a token of a prompt.
MAX_LENS_ROWS = 2**14
# The features of an autoencoder are a part of the answer's JSON text.
MAX_FEATURE_BYTES = 4 * 2**20


def account_of(
    request: InterpRequest,
    sites: tuple[Site, ...],
    held: dict[int, int],
    num_prompt: int,
    num_tokens: int,
    num_choices: int = 1,
) -> Account:
    """What the request takes at most. `held` has the number of captured positions by site. Raises
    `InvalidRequestError` if that is more than it may take.
    """
    account, widths = Account(request.max_bytes), {site.name: site.width for site in sites}
    for index, count in held.items():
        account.add("captures", count * (4 * sites[index].width + 5))

    def result(capture: Capture) -> int:
        count = capture.span.count(num_prompt, num_tokens)
        return count * (4 * widths.get(capture.site, 0) + _POSITION) + _ENTRY

    account.add("results", sum(map(result, request.captures)))
    if request.reads:
        account.add("results", _FACTS + _TOKEN * num_tokens)
    if (lens := request.lens) is not None:
        count = lens.span.count(num_prompt, num_tokens)
        entries = len(lens.layers) * count * lens.top
        account.add("lens", 8 * entries + _POSITION * (count + len(lens.layers)) + 2 * _ENTRY)
        account.add("tuned lens", sum(len(a) + len(b) for a, b in lens.tuned))
    if (attention := request.attention) is not None:
        count = attention.span.count(num_prompt, num_tokens)
        heads = max((site.shape[0] for site in sites if site.part == "rot_q"), default=0)
        if attention.heads is not None:
            heads = len(attention.heads)
        pattern = count * (4 * heads * num_tokens + _POSITION) + _ENTRY
        account.add("attention patterns", len(attention.layers) * pattern)
    if request.attribution is not None:
        account.add("attribution", _SHARE * (len(sites) + num_tokens))
    for edit in request.edits:
        account.add("edits", num_choices * sum(2 * len(data) + 256 for data in edit.vectors))
    account.check()
    _check_parts(request, sites, num_prompt, num_tokens)
    return account


def _check_parts(
    request: InterpRequest, sites: tuple[Site, ...], num_prompt: int, num_tokens: int
) -> None:
    """Bounds of parts that have limits of their own."""
    if (lens := request.lens) is not None:
        rows = len(lens.layers) * lens.span.count(num_prompt, num_tokens)
        if rows > MAX_LENS_ROWS:
            raise InvalidRequestError(
                f"interp.lens: {len(lens.layers)} layers would be read at {rows:,} places in all,"
                f" and may be at {MAX_LENS_ROWS:,}; ask for fewer layers or positions.",
                param="interp.lens",
            )
    if request.attribution is not None and request.attribution.method == "input_x_gradient":
        layers = 1 + max((site.layer for site in sites), default=0)
        heads = max((site.shape[0] for site in sites if site.part == "rot_q"), default=1)
        own = sum(site.width for site in sites if site.layer == 0)
        num_bytes = 4 * num_tokens * layers * (3 * own + heads * num_tokens)
        if num_bytes > MAX_GRADIENT_BYTES:
            raise InvalidRequestError(
                f"interp.attribution: the gradient of {num_tokens:,} tokens would take about"
                f" {num_bytes:,} bytes, and may take {MAX_GRADIENT_BYTES:,}; send a shorter prompt,"
                " or use method direct.",
                param="interp.attribution",
            )
    if request.features_top:
        count = request.captures[-1].span.count(num_prompt, num_tokens)
        num_bytes = count * (request.features_top + 2) * _FEATURE
        if num_bytes > MAX_FEATURE_BYTES:
            raise InvalidRequestError(
                f"interp.features: the features of {count:,} positions would take {num_bytes:,}"
                f" bytes of the answer, and may take {MAX_FEATURE_BYTES:,}; ask for fewer positions"
                " or a smaller top.",
                param="interp.features",
            )
