"""What a backend needs of a request besides its prompt: sampling parameters, tenant, cache salt,
priority and time limits.
"""

import secrets
import time

import msgspec
from starlette.requests import Request

from engine.core.interfaces.backend import GenerationContext, GrammarSpec, ModelCard
from engine.core.interfaces.request import TRUNCATING_FIELDS, UNSHARED, SamplingParams
from engine.servers.access.auth import is_acting, principal_of
from engine.servers.http.request_log import record_of
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.services import Services

REPLACED_BY_MIROSTAT = (*TRUNCATING_FIELDS, "min_keep", "samplers")
_DEFAULT_PARAMS = SamplingParams()
# The lowest priority (the largest number), so that lines of batches and other offline work run
# after all requests of clients.
OFFLINE_PRIORITY = 100
# Names that clients use for sampling parameters, if they have other names here.
_SENT_AS = {"text_bias": "logit_bias"}
SESSION_HEADER = "x-session-id"


def generation_context(
    services: Services,
    request: Request,
    card: ModelCard,
    body: SamplingBody,
    params: SamplingParams,
    completion_id: str,
    grammar: GrammarSpec | None = None,
) -> GenerationContext:
    """Everything that the backend needs besides the prompt: sampling parameters, model, tenant,
    salt and time limits. Also sets fields of the request's log line.
    """
    _check_params(services, request, card, params)
    principal = principal_of(request)
    record = record_of(request.scope)
    record.completion_id = completion_id
    record.accepted_at = time.monotonic()
    record.tenant = principal.name
    record.metadata = body.metadata or None
    note_end_user(request, body.end_user)
    salt = principal.name
    if body.cache_salt is not None:
        salt = principal.digest(body.cache_salt)
    if body.cache_prompt is False:
        salt = UNSHARED + secrets.token_hex(16)
    return GenerationContext(
        request_id=completion_id,
        params=params,
        model=card.id,
        session=_session(request, body),
        priority=priority_of(services, request, card, body.priority),
        salt=salt,
        tenant=principal.name,
        timeout_s=services.settings.server.request_timeout_s,
        queue_timeout_s=queue_timeout_s(services, request),
        grammar=grammar,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        expected=body.expected_text,
        notes=services.history.notes_of(record),
    )


def context_of_prompt(context: GenerationContext, index: int) -> GenerationContext:
    """The context of one of several prompts of a request. Only the first prompt has a queue
    timeout, because the others may have to wait for it.
    """
    return msgspec.structs.replace(
        context,
        request_id=f"{context.request_id}-{index}",
        queue_timeout_s=context.queue_timeout_s if index == 0 else None,
    )


def priority_of(services: Services, request: Request, card: ModelCard, asked: int | None) -> int:
    """The request's priority. Warns the client if the backend ignores priorities. This is no
    error, because a priority is only a hint.
    """
    if asked and "priority" in card.lacks:
        services.warn(request, "priority", f"has no effect, its backend ({card.backend}) has none")
    if asked is not None:
        return asked
    return OFFLINE_PRIORITY if is_acting(request.scope) else 0


def queue_timeout_s(services: Services, request: Request) -> float | None:
    """Max seconds that the request may wait in the queue for its first step. None for batches
    and other offline work, for which no client waits.
    """
    is_own = is_acting(request.scope)
    return None if is_own else services.settings.server.queue_timeout_s


def note_end_user(request: Request, user: str | None) -> None:
    """Write a hash of the end user's name to the request log, so that abuse can be traced
    without storing the name.
    """
    if user:
        digest = principal_of(request).digest(user)
        record_of(request.scope).user_hash = digest[:16]


def _check_params(
    services: Services, request: Request, card: ModelCard, params: SamplingParams
) -> None:
    """Refuse sampling parameters that the model's backend lacks. Warn about those that it
    emulates, and about samplers that Mirostat replaces.
    """
    for name in REPLACED_BY_MIROSTAT if params.mirostat else ():
        if getattr(params, name) != getattr(_DEFAULT_PARAMS, name):
            services.warn(request, name, "has no effect, mirostat replaces it")
    if not (card.lacks or card.emulated):
        return
    for name in SamplingParams.__struct_fields__:
        if getattr(params, name) == getattr(_DEFAULT_PARAMS, name):
            continue
        if name in card.lacks:
            what = f"is answered by a backend ({card.backend}) that has no such parameter"
            services.require(card, name, _SENT_AS.get(name, name), what)
        elif name in card.emulated:
            services.warn(request, name, f"emulated, for its backend ({card.backend}) lacks it")


def _session(request: Request, body: SamplingBody) -> str:
    """A hash of the name that the client gave to the conversation. Empty if the client sent
    none.
    """
    named = request.headers.get(SESSION_HEADER) or body.conversation_key
    return principal_of(request).digest(named) if named else ""
