"""Parses the items of a request's `input` into one normalized form, which is also the stored form.

Clients often send complete output items back as input. So all fields of output items are accepted,
some of them only if they are empty. User messages may have images. Parsing stops at the first
error, which names its place in the input.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.servers.http.errors import check_keys, describe, problem, short_text
from engine.servers.responses.store import PREFIX
from engine.servers.schema.images import check_detail, image_from_url

MAX_ITEMS = 4_096
MAX_PARTS = 1_024
MAX_ID = 512
MAX_NAME = 128

Item = dict[str, Any]
IMAGE_PART = "input_image"

_ROLES = ("user", "assistant", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
# Maps the types of text parts to the field that has the text.
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields of output text that are ignored, because a prompt can't use them.
_PART_NOTES = ("annotations", "logprobs", "parsed")
# Fields that OpenAI's built-in tools set. They are accepted only if they are empty.
_EMPTY_ONLY = ("phase", "caller", "namespace", "created_by", "encrypted_content")


def parse_input(value: Any) -> tuple[Item, ...]:
    if isinstance(value, str):
        return (_item({"role": "user", "content": value}, "input"),)
    if not isinstance(value, list):
        raise problem("input", f"should be text or a list of items, got {describe(value)}")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise problem("input", f"should have 1 to {MAX_ITEMS} items, got {len(value)}")
    return parse_items(value, "input")


def parse_items(values: Sequence[Any], where: str) -> tuple[Item, ...]:
    return tuple(_item(item, f"{where}[{i}]") for i, item in enumerate(values))


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """Give every item an id: the client's id if there is one, otherwise an id made from the item's
    index.
    """
    return [
        {"id": item_id(item["type"], response_id, index, is_input=True)} | item
        for index, item in enumerate(items)
    ]


ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
}
_INPUT_MARK = 0x8000
_INDEX_DIGITS = 4


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    """An id made of the response's id and the item's index. So the stored response can be found
    from the item's id.
    """
    place = index | _INPUT_MARK if is_input else index
    return f"{ID_PREFIXES[kind]}{response_id.removeprefix(PREFIX)}{place:0{_INDEX_DIGITS}x}"


def response_of(item_id: str) -> str:
    """The id of the response to which an item belongs. This is only valid if `item_id` made the
    id.
    """
    return PREFIX + item_id.partition("_")[2][:-_INDEX_DIGITS]


def _item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise problem(where, f"should be an object, got {describe(item)}")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if not isinstance(kind, str) or kind not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise problem(f"{where}.type", f"should be one of {known}; got {describe(kind)}")
    parse, own = _PARSERS[kind]
    for key, value in item.items():
        if key in own or key in ("type", "id", "status"):
            continue
        if key not in _EMPTY_ONLY:
            raise problem(f"{where}.{key[:64]}", f"is not a field of an item of type {kind}")
        if value not in (None, [], ""):
            raise problem(f"{where}.{key}", "is not supported by this server; leave it out")
    made = {"type": kind} | parse(item, where)
    if item.get("id") is not None:
        made["id"] = short_text(item["id"], f"{where}.id", MAX_ID)
    status = item.get("status")
    if status is not None and status not in _STATUSES:
        expected = ", ".join(_STATUSES)
        raise problem(f"{where}.status", f"should be one of {expected}; got {describe(status)}")
    return made if kind == "item_reference" else made | {"status": status or "completed"}


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        expected = ", ".join(_ROLES)
        raise problem(f"{where}.role", f"should be one of {expected}; got {describe(role)}")
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    if content == [] and role == "assistant":
        content = [{"type": "output_text", "text": ""}]
    parts = _parts(content, f"{where}.content", with_images=role == "user")
    if role == "assistant":
        parts = [_output_text(part["text"]) if "text" in part else part for part in parts]
    return {"role": role, "content": parts}


def _parts(content: Any, where: str, with_images: bool = False) -> list[Item]:
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        rule = f"should be a string or a list of 1 to {MAX_PARTS} parts"
        raise problem(where, f"{rule}, got {describe(content)}")
    return [_part(part, f"{where}[{i}]", with_images) for i, part in enumerate(content)]


def _part(part: Any, where: str, with_images: bool) -> Item:
    if not isinstance(part, dict):
        raise problem(where, f"should be an object, got {describe(part)}")
    kind = part.get("type")
    if kind == IMAGE_PART and with_images:
        return _image_part(part, where)
    if not isinstance(kind, str) or kind not in _PARTS:
        known = (*_PARTS, IMAGE_PART) if with_images else _PARTS
        rule = f"this server takes {', '.join(known)} here"
        raise problem(f"{where}.type", f"{rule}, got {describe(kind)}")
    field = _PARTS[kind]
    for key in part:
        if key not in ("type", field, *_PART_NOTES):
            raise problem(f"{where}.{key[:64]}", f"is not a field of {kind}")
    text = part.get(field)
    if not isinstance(text, str):
        raise problem(f"{where}.{field}", f"should be a string, got {describe(text)}")
    return {"type": kind, "refusal": text} if field == "refusal" else _input_text(text)


def _image_part(part: Item, where: str) -> Item:
    check_keys(part, ("type", "image_url", "detail", "file_id"), where)
    if part.get("file_id") is not None:
        raise problem(f"{where}.file_id", "is not supported; send the image in image_url")
    check_detail(part.get("detail"), f"{where}.detail")
    image_from_url(part.get("image_url"), f"{where}.image_url")
    return {"type": IMAGE_PART, "image_url": part["image_url"], "detail": "auto"}


def _input_text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(item: Item, where: str) -> Item:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise problem(
            f"{where}.arguments", f"should be JSON text of an object, got {describe(arguments)}"
        )
    return {
        "call_id": short_text(item.get("call_id"), f"{where}.call_id", MAX_ID),
        "name": short_text(item.get("name"), f"{where}.name", MAX_NAME),
        "arguments": arguments,
    }


def _function_call_output(item: Item, where: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, f"{where}.output")
    made: Item = {
        "call_id": short_text(item.get("call_id"), f"{where}.call_id", MAX_ID),
        "output": output,
    }
    if item.get("name") is not None:
        made["name"] = short_text(item["name"], f"{where}.name", MAX_NAME)
    return made


def _reasoning(item: Item, where: str) -> Item:
    return {
        "summary": _thoughts(item.get("summary"), f"{where}.summary", "summary_text"),
        "content": _thoughts(item.get("content"), f"{where}.content", "reasoning_text"),
    }


def _thoughts(value: Any, where: str, kind: str) -> list[Item]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        rule = f"should be a list of at most {MAX_PARTS} parts"
        raise problem(where, f"{rule}, got {describe(value)}")
    for position, part in enumerate(value):
        is_text = isinstance(part, dict) and set(part) == {"type", "text"}
        if not is_text or part["type"] != kind or not isinstance(part["text"], str):
            raise problem(f"{where}[{position}]", f"should be a text of type {kind}")
    return value


def _compaction(item: Item, where: str) -> Item:
    text = item.get("encrypted_content")
    if not isinstance(text, str):
        raise problem(f"{where}.encrypted_content", f"should be a string, got {describe(text)}")
    return {"encrypted_content": text}


def _reference(item: Item, where: str) -> Item:
    return {"id": short_text(item.get("id"), f"{where}.id", MAX_ID)}


# Maps the type of an item to its parser and its allowed fields.
_PARSERS: dict[str, tuple[Callable[[Item, str], Item], tuple[str, ...]]] = {
    "message": (_message, ("role", "content")),
    "function_call": (_function_call, ("call_id", "name", "arguments")),
    "function_call_output": (_function_call_output, ("call_id", "output", "name")),
    "reasoning": (_reasoning, ("summary", "content")),
    "compaction": (_compaction, ("encrypted_content",)),
    "item_reference": (_reference, ()),
}
