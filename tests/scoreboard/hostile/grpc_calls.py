"""Hostile calls of the Open Inference Protocol by gRPC."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine.servers.kserve.grpc_messages import CLASSES, SERVICE, UNARY
from tests.scoreboard.hostile.cases import Answer
from tests.scoreboard.hostile.fields import Known
from tests.scoreboard.hostile.values import text, words

STREAM = "ModelStreamInfer"
METHODS = (*UNARY, STREAM)
MAX_STREAMED = 50
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


def message(rng: random.Random, method: str, known: Known) -> bytes:
    """The bytes of a request, mostly of a valid one."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((1, 100, 100_000)))
    name = "ModelInfer" if method == STREAM else method
    made = CLASSES[f"{name}Request"]()
    for each in made.DESCRIPTOR.fields:
        if each.name in ("name", "model_name"):
            setattr(made, each.name, known.model if rng.random() < 0.9 else _plain(rng) * 100)
    if name == "ModelInfer":
        _fill(rng, made)
    return bytes(made.SerializeToString())


def _fill(rng: random.Random, made: Any) -> None:
    made.id = rng.choice(("", "1", _plain(rng) * rng.choice((1, 1_000))))
    prompt = made.inputs.add(name="text_input", datatype=rng.choice(("BYTES", "BYTES", "FP32", "")))
    prompt.shape.extend(rng.choice(([1], [1], [1, 1], [2**62], [-1], [1] * 1_000, [2], [])))
    data = [_plain(rng).encode() if rng.random() < 0.2 else words(rng, 3).encode()]
    if rng.random() < 0.5:
        prompt.contents.bytes_contents.extend(data * rng.choice((1, 1, 2, 5_000)))
    else:
        size = rng.choice((len(data[0]), len(data[0]), 0, 2**32 - 1))
        raw = struct.pack("<I", size) + data[0]
        made.raw_input_contents.extend([raw] * rng.choice((1, 1, 3)))
    limit = made.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
    limit.contents.int_contents.append(rng.choice((1, 2, 0, -1, 2**31 - 1)))
    for _ in range(rng.choice((0, 1, 3, 200))):
        name = rng.choice(("temperature", "n", "stream", "logprobs", _plain(rng)))
        extra = made.inputs.add(name=name, datatype=rng.choice(("FP32", "BOOL", "INT64")))
        extra.shape.append(1)
        extra.contents.fp32_contents.append(rng.choice((1.0, float("nan"), float("inf"))))
    for _ in range(rng.choice((0, 0, 1, 200))):
        made.parameters[_plain(rng)].int64_param = rng.choice((0, -1, 2**62))


def _plain(rng: random.Random) -> str:
    return text(rng).encode("utf-8", "replace").decode()


async def call(port: int, target: str, content: bytes, key: str, seed: int) -> Answer:
    """Call a method. The status of the answer is the nearest one of HTTP."""
    rng = random.Random(seed)
    metadata = (("authorization", f"Bearer {key}"),)
    answer = Answer()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            if target.endswith(STREAM):
                await _stream(channel, target, content, metadata, rng)
            else:
                calling = channel.unary_unary(target)(content, metadata=metadata)
                if rng.random() < 0.1:
                    calling.cancel()
                await calling
            answer.status = 200
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            answer.has_left = True
        except grpc.aio.AioRpcError as error:
            answer.status = 500 if error.code() in BUGS else 400
            answer.body = f"{error.code().name}: {error.details()}".encode("utf-8", "replace")
    return answer


async def _stream(
    channel: grpc.aio.Channel, target: str, content: bytes, metadata: Any, rng: random.Random
) -> None:
    count = rng.choice((1, 1, 2, MAX_STREAMED))

    async def sent() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield content

    calling = channel.stream_stream(target)(sent(), metadata=metadata)
    leaves_after = rng.choice((None, 1))
    read = 0
    async for _ in calling:
        read += 1
        if read == leaves_after:
            calling.cancel()
            return


def targets() -> list[str]:
    return [f"/{SERVICE}/{method}" for method in METHODS]
