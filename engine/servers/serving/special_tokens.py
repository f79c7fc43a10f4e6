"""Names of control tokens in prompts: whether they become tokens, and warnings if not."""

import functools
import re
from collections.abc import Sequence

from starlette.requests import Request

from engine.core.interfaces.backend import ModelCard, TokenizerInfo
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.access.auth import principal_of
from engine.servers.serving.services import Services

# Prompts up to this size are searched on the event loop.
INLINE_CHARACTERS = 8_192


async def parses_special(
    services: Services,
    request: Request,
    card: ModelCard,
    asked: bool | None,
    texts: Sequence[object],
) -> bool:
    """Whether names of control tokens in the prompts `texts` become these tokens. If not, and a
    text has such a name, the client is warned. `asked` is the request's `parse_special`; the
    key's setting is its default.
    """
    parses = principal_of(request).parse_special if asked is None else asked
    if parses or asked is not None:
        return parses
    info = await services.backend.tokenizer_info(model=card.id)
    if info is None:
        return False
    for text in texts:
        if isinstance(text, str) and (found := await _control_token(text, info)) is not None:
            what = f"{found} in the prompt is read as text; set it to true for a control token"
            services.warn(request, "parse_special", what)
            break
    return False


async def _control_token(text: str, info: TokenizerInfo) -> str | None:
    """The first name of a control token in `text`."""

    def search() -> str | None:
        found = _control_tokens(tuple(info.special_tokens)).search(text)
        return None if found is None else found.group()

    if len(text) <= INLINE_CHARACTERS:
        return search()
    return await after_other_long_texts(search)


@functools.lru_cache(maxsize=16)
def _control_tokens(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
