"""File names that clients give. They are shown again, in JSON and in one header, and are used for
nothing else: a file's place on the disk never depends on them.
"""

import unicodedata
from urllib.parse import quote

MAX_NAME_LENGTH = 255
_UNNAMED = "upload.jsonl"


def safe_name(given: str) -> str:
    """The last part of a path, without control characters or marks that reorder what is shown."""
    last = given.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(
        each for each in last if unicodedata.category(each)[0] not in "CZ" or each == " "
    )
    name = kept.strip(" .")[:MAX_NAME_LENGTH]
    return name or _UNNAMED


def content_disposition(name: str) -> str:
    """A header value that makes a browser save the file under `name`, and never show it."""
    plain = "".join(each if each.isalnum() or each in "._- " else "_" for each in name)
    ascii_name = plain.encode("ascii", "replace").decode().replace("?", "_")
    return f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(name, safe='')}"
