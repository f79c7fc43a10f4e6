"""Slots for background work: no tenant stops the work of another."""

import asyncio

from engine.servers.storage.fair_slots import FairSlots


def flood(slots: FairSlots, tenant: str, count: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(slots.acquire(tenant)) for _ in range(count)]


def num_held(tasks: list[asyncio.Task[None]]) -> int:
    return sum(each.done() and not each.cancelled() for each in tasks)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_flood_leaves_fair_slots_to_another_tenant() -> None:
    slots = FairSlots(16)
    many = flood(slots, "a", 100)
    await settle()
    few = flood(slots, "b", 3)
    await settle()
    assert num_held(many) == 14 and num_held(few) == 1
    slots.release("a")
    await settle()
    assert num_held(few) == 2, "a free slot is for whom has the fewest"
    for each in many + few:
        each.cancel()


async def test_a_cancelled_waiter_keeps_no_slot() -> None:
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting, late = flood(slots, "b", 2)
    await settle()
    waiting.cancel()
    await settle()
    slots.release("a")
    late.cancel()  # in the moment in which it gets the slot
    await settle()
    assert late.cancelled()
    async with asyncio.timeout(60), slots.slot("c"):
        pass
