"""One thread for all work on long texts.

While a text of a megabyte is tokenized, the GIL is held again and again, for some milliseconds each
time. Several long texts in parallel would starve the event loop. So all long texts share one thread
and wait for each other. Short texts don't use this thread and never wait for long ones.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="long-texts")


async def after_other_long_texts(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)
