"""Streams that follow other work count for their tenant, from the request to their end."""

from collections.abc import AsyncIterator

import pytest

from engine.core.errors import RateLimitError
from engine.servers.serving.followers import MAX_FOLLOWERS, Followers


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        yield number


async def test_each_tenant_has_a_number_of_streams() -> None:
    followers = Followers()
    streams = [followers.follow("a", numbers()) for _ in range(MAX_FOLLOWERS)]
    with pytest.raises(RateLimitError):
        followers.follow("a", numbers())
    assert [each async for each in followers.follow("b", numbers())] == [0, 1, 2]
    assert [each async for each in streams[0]] == [0, 1, 2]
    left = followers.follow("a", numbers())
    assert await anext(left) == 0
    await left.aclose()
    streams.append(followers.follow("a", numbers()))
    del streams[1]  # which was never read
    assert await anext(followers.follow("a", numbers())) == 0
