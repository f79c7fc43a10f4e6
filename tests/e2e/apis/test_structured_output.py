"""Schemas from elsewhere on the real model, at temperature 1: whatever ends by itself validates.

An answer that the token limit cut off proves nothing, so those are counted and bounded. The quick
test takes a sample; the slow one asks until 200 answers have been validated.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.files.schema_suites import (
    NamedSchema,
    real_schemas,
    suite_schemas,
    supported_among,
)
from tests.support.servers.served import ServedEngine

MAX_TOKENS = 160
CONCURRENCY = 16
# A model this small at temperature 1 often has no end in sight: it writes numbers for ever.
LEAST_ENDED = 0.5


@dataclass
class Tally:
    num_valid: int = 0
    num_cut: int = 0
    faults: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, named: NamedSchema, seed: int, tally: Tally) -> None:
    name, schema = named
    question = f"Give one example that matches this schema: {json.dumps(schema)[:400]}"
    response = await client.post(
        "/v1/chat/completions",
        json={
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": question}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "example", "schema": schema, "strict": True},
            },
            "temperature": 1,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
        },
    )
    if response.status_code != 200:
        tally.faults.append(f"{name}: {response.text}")
        return
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "length":
        tally.num_cut += 1
        return
    fault = fault_of(schema, choice["message"]["content"])
    if fault is None:
        tally.num_valid += 1
    else:
        tally.faults.append(f"{name}: {fault}")


def fault_of(schema: Any, content: str) -> str | None:
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(content))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{content!r}: {error}"[:400]
    return None


async def generate(url: str, schemas: list[NamedSchema], wanted: int) -> Tally:
    """Ask for the schemas in turn, over and over, until so many answers are valid."""
    tally = Tally()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for seed in range(0, 10 * wanted, CONCURRENCY):
            if tally.num_valid >= wanted:
                break
            batch = [schemas[(seed + i) % len(schemas)] for i in range(CONCURRENCY)]
            await asyncio.gather(
                *(ask(client, named, seed + i, tally) for i, named in enumerate(batch))
            )
    return tally


async def spread_out(count: int) -> list[NamedSchema]:
    """Supported schemas, evenly from all over; about every second one there is can be used."""
    schemas = [*suite_schemas(), *real_schemas()]
    step = max(1, len(schemas) // (2 * count))
    return await supported_among(schemas[::step])


def check(tally: Tally, wanted: int) -> None:
    assert not tally.faults, tally.faults[:5]
    assert tally.num_valid >= wanted
    assert tally.num_valid >= LEAST_ENDED * (tally.num_valid + tally.num_cut), tally


async def test_answers_to_16_sampled_schemas_validate_at_temperature_1(
    server: ServedEngine,
) -> None:
    check(await generate(server.url, await spread_out(16), 8), 8)


@pytest.mark.slow
async def test_answers_to_200_schemas_validate_at_temperature_1(server: ServedEngine) -> None:
    schemas = await spread_out(200)
    tally = await generate(server.url, schemas, 200)
    print(f"{tally.num_valid} valid, {tally.num_cut} cut off, {len(schemas)} schemas")
    check(tally, 200)
