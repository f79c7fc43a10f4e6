"""Rules for how a server refuses requests.

OpenAI's SDKs read `error.message`, `.type`, `.param` and `.code`, and map the status to an
exception. They retry every 5xx, so a bad request that is answered with 500 is sent three times.
"""

from engine_tools.conformance.expect import RuleSkipped, expect, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import CHAT, COMPLETIONS, Target

ERRORS = Group("errors")
SDK = "openai-python"
_STAINLESS = "x-stainless-lang,x-stainless-os,x-stainless-retry-count"


@ERRORS.rule(
    "ERR-01",
    "An error body is an object under `error` with a message",
    client=SDK,
    sees="an exception whose text is the raw body instead of a message",
)
async def error_object(target: Target) -> None:
    reply = (await target.bad_request()).refused()
    expect(bool(text(reply.error, "message")), "error.message is empty")


@ERRORS.rule(
    "ERR-02",
    "`error.type` is a string",
    client=SDK,
    sees="`error.type` is None or of another type than declared",
)
async def error_type(target: Target) -> None:
    expect(bool(text((await target.bad_request()).error, "type")), "error.type is empty")


@ERRORS.rule(
    "ERR-03",
    "`error.code` is a string or null",
    client=SDK,
    sees="`error.code` is a number: code that compares it with names never matches",
)
async def error_code(target: Target) -> None:
    code = (await target.bad_request()).error.get("code")
    expect(code is None or isinstance(code, str), f"error.code is {short(code)}")


@ERRORS.rule(
    "ERR-04",
    "`error.param` is a string or null",
    client=SDK,
    sees="`error.param` is of another type than declared",
)
async def error_param(target: Target) -> None:
    param = (await target.bad_request()).error.get("param")
    expect(param is None or isinstance(param, str), f"error.param is {short(param)}")


@ERRORS.rule(
    "ERR-05",
    "`error.param` names the field that was wrong",
    client=SDK,
    sees="no hint which parameter to change except in prose",
    severity="advice",
)
async def error_param_names(target: Target) -> None:
    param = (await target.bad_request()).error.get("param")
    expect(isinstance(param, str) and "messages" in param, f"error.param is {short(param)}")


@ERRORS.rule(
    "ERR-06",
    "Errors are sent as application/json",
    client=SDK,
    sees="the body is read as text, and message, type and code are lost",
)
async def error_content_type(target: Target) -> None:
    kind = (await target.bad_request()).headers.get("content-type", "")
    expect(kind.startswith("application/json"), f"content-type is {short(kind)}")


@ERRORS.rule(
    "ERR-07",
    "An error shows no stack trace",
    client="Open WebUI",
    sees="the trace of the server's code in the chat window",
)
async def no_trace(target: Target) -> None:
    expect(b"Traceback" not in (await target.bad_request()).content, "the body has a stack trace")


@ERRORS.rule(
    "ERR-08",
    "An unknown model is 404",
    client=SDK,
    sees="BadRequestError or an answer of another model instead of NotFoundError",
)
async def unknown_model(target: Target) -> None:
    reply = await target.post(CHAT, target.chat(model="no-such/model-anywhere"))
    expect(reply.status == 404, f"an unknown model is answered with {reply.summary}")
    text(reply.error, "message")


@ERRORS.rule(
    "ERR-09",
    "An unknown model is 404 in /v1/completions too",
    client="Continue",
    sees="autocompletion from another model than the one configured",
)
async def unknown_completion_model(target: Target) -> None:
    known = await target.post(COMPLETIONS, target.completion())
    if known.status == 404:
        raise RuleSkipped("no /v1/completions (HTTP 404)")
    reply = await target.post(COMPLETIONS, target.completion(model="no-such/model-anywhere"))
    expect(reply.status == 404, f"an unknown model is answered with {reply.summary}")


@ERRORS.rule(
    "ERR-10",
    "A body that is not JSON is refused",
    client=SDK,
    sees="the broken request is sent three times if the status is 5xx",
)
async def bad_json(target: Target) -> None:
    reply = (await target.post_raw(CHAT, b'{"model": "x", "messages": [')).refused()
    text(reply.error, "message")


@ERRORS.rule(
    "ERR-11",
    "A JSON body that is no object is refused",
    client=SDK,
    sees="the broken request is sent three times if the status is 5xx",
)
async def not_an_object(target: Target) -> None:
    (await target.post(CHAT, ["not", "an", "object"])).refused()


@ERRORS.rule(
    "ERR-12",
    "A request without messages is refused",
    client=SDK,
    sees="an answer to nothing, or three failures if the status is 5xx",
)
async def no_messages(target: Target) -> None:
    (await target.post(CHAT, {"model": target.model})).refused()


@ERRORS.rule(
    "ERR-13",
    "A refused stream is an HTTP error in JSON, not an event stream",
    client="Open WebUI",
    sees="an error with an event-stream type is not shown as an error",
)
async def refused_stream(target: Target) -> None:
    body = target.chat(messages="not a list", stream=True)
    reply = (await target.post(CHAT, body)).refused()
    kind = reply.headers.get("content-type", "")
    expect("event-stream" not in kind, f"content-type is {short(kind)}")
    text(reply.error, "message")


@ERRORS.rule(
    "ERR-14",
    "An unknown route is 404",
    client="gateways",
    sees="a probe for another engine's routes seems to succeed",
)
async def unknown_route(target: Target) -> None:
    reply = await target.get("/v1/no-such-route-anywhere")
    expect(reply.status == 404, f"an unknown route is answered with {reply.summary}")


@ERRORS.rule(
    "ERR-15",
    "An unknown route has the same error body as the rest",
    client=SDK,
    sees="NotFoundError without message, type and code",
    severity="advice",
)
async def unknown_route_body(target: Target) -> None:
    text((await target.get("/v1/no-such-route-anywhere")).error, "message")


@ERRORS.rule(
    "ERR-16",
    "A wrong method is 405 or 404",
    client="load balancers",
    sees="a mistake of the client counts as a server failure",
)
async def wrong_method(target: Target) -> None:
    # GET is no mistake there: OpenAI lists stored chats.
    reply = await target.delete(CHAT)
    expect(reply.status in (404, 405), f"DELETE {CHAT} is answered with {reply.summary}")


@ERRORS.rule(
    "ERR-17",
    "Every answer has an x-request-id",
    client=SDK,
    sees="`request_id` is None, so a report can't be matched with the server's log",
    severity="advice",
)
async def request_id(target: Target) -> None:
    good = await target.post(CHAT, target.chat(max_tokens=1))
    bad = await target.bad_request()
    expect("x-request-id" in good.headers, "no x-request-id on a success")
    expect("x-request-id" in bad.headers, "no x-request-id on an error")
    expect(good.headers["x-request-id"] != bad.headers["x-request-id"], "the id is always the same")


@ERRORS.rule(
    "ERR-18",
    "A hopeless request says x-should-retry: false",
    client=SDK,
    sees="nothing for a 400; the header is what also stops retries behind a proxy's 5xx",
    severity="advice",
)
async def should_retry(target: Target) -> None:
    found = (await target.bad_request()).headers.get("x-should-retry")
    expect(found == "false", f"x-should-retry is {short(found)}")


@ERRORS.rule(
    "ERR-19",
    "A wrong key is 401 with an error object",
    client=SDK,
    sees="an exception whose text is the raw body, or no AuthenticationError",
)
async def wrong_key(target: Target) -> None:
    headers = {"authorization": "Bearer not-the-key-of-this-server"}
    reply = await target.get("/v1/models", headers=headers)
    if reply.status == 200:
        raise RuleSkipped("the server takes any key")
    expect(reply.status == 401, f"a wrong key is answered with {reply.summary}")
    text(reply.error, "message")


@ERRORS.rule(
    "ERR-20",
    "Where CORS is on, the SDK's headers are allowed",
    client="openai-node in a browser",
    sees="every request is blocked by the browser",
)
async def cors(target: Target) -> None:
    headers = {
        "origin": "https://app.example.com",
        "access-control-request-method": "POST",
        "access-control-request-headers": f"authorization,content-type,{_STAINLESS}",
    }
    reply = await target.request("OPTIONS", CHAT, headers=headers)
    if "access-control-allow-origin" not in reply.headers:
        raise RuleSkipped("CORS is off")
    listed = reply.headers.get("access-control-allow-headers", "").lower()
    allowed = {name.strip() for name in listed.split(",")}
    # In this CORS header, a "*" does not include `authorization`.
    wanted = {"authorization"} | (set() if "*" in allowed else set(_STAINLESS.split(",")))
    expect(wanted <= allowed, f"not allowed: {', '.join(sorted(wanted - allowed))}")
