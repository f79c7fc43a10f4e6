"""One thread for all work on long texts.

Tokenizing a megabyte holds the GIL for milliseconds at a time, again and again. Several long texts
in parallel would starve the event loop. In one thread they only wait for each other, and short
texts never wait for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="long-texts")


async def after_other_long_texts(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)
