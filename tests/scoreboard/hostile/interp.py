"""Hostile `interp` objects: all readings and edits, in all combinations, at their limits."""

import random
from typing import Any

from engine.core.interp.spec import MAX_CAPTURES, MAX_EDITS, MAX_POSITIONS, MAX_TOP

NUM_LAYERS, NUM_HEADS, WIDTH = 30, 9, 576  # of the default model
SITES = (
    "hook_embed",
    "ln_final.hook_normalized",
    *(
        f"blocks.{layer}.{part}"
        for layer in (0, 7, NUM_LAYERS - 1)
        for part in (
            *("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out"),
            *("hook_mlp_out", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z"),
            *("attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_pattern", "mlp.hook_pre"),
            "mlp.hook_post",
        )
    ),
)
LARGE_SHARE = 0.2
NO_SITES = ("blocks.99.hook_resid_post", "blocks.-1.hook_mlp_out", "hook", "blocks.0." + "x" * 118)
ALL = list(range(NUM_LAYERS))
# Sound ones that make as much as a prompt allows.
LARGE: tuple[dict[str, Any], ...] = (
    {"attention": {"layers": ALL, "positions": "all"}},
    {"attention": {"layers": ALL[:3] * 100, "positions": "all", "heads": [0] * 500}},
    {"attention": {"layers": [0], "positions": [-1] * 30_000}},
    {"lens": {"layers": "all", "positions": "all", "top": MAX_TOP}},
    {"lens": {"layers": ALL * 30, "positions": "last", "top": MAX_TOP}},
    {"capture": [{"site": "hook_embed", "positions": "all"}] * 40},
    {"capture": [{"site": site, "positions": "all"} for site in SITES if "pattern" not in site]},
)
PARTS = ("capture", "edit", "lens", "attention", "features", "attribution")


def interp(rng: random.Random, results: list[str]) -> dict[str, Any]:
    """Any combination of readings and edits. `results` are ids of earlier captures."""
    if rng.random() < LARGE_SHARE:
        return rng.choice(LARGE)
    if results and rng.random() < LARGE_SHARE / 4:
        source = {"id": rng.choice(results), "positions": [0] * 32_000}
        return {"edit": [{"site": "hook_embed", "op": "patch", "from": source}]}
    drawn = {
        "capture": lambda: _captures(rng),
        "edit": lambda: _edits(rng, results),
        "lens": lambda: _lens(rng),
        "attention": lambda: _attention(rng),
        "features": lambda: {"sae": "absent", "top": _top(rng), "positions": _positions(rng)},
        "attribution": lambda: _attribution(rng),
    }
    chosen = rng.sample(PARTS, rng.choice((1, 1, 2, 3, 6)))
    found: dict[str, Any] = {part: drawn[part]() for part in chosen}
    if rng.random() < 0.4:
        found["store"] = rng.random() < 0.5
    if rng.random() < 0.3:
        found["encoding_format"] = rng.choice(("float", "base64", "base64", "hex"))
    return found


def _positions(rng: random.Random) -> Any:
    match rng.randrange(9):
        case 0 | 1:
            return "all"
        case 2 | 3:
            return "last"
        case 4:
            return [0] * rng.choice((100, 32_000, MAX_POSITIONS, MAX_POSITIONS + 1))
        case 5:
            return list(range(-rng.choice((1, 5, 2_000)), 0))
        case 6:
            return []
        case 7:
            return [rng.choice((2**24, -(2**24), 2**24 + 1, 10**9))]
    return [0, -1]


def _phase(rng: random.Random) -> dict[str, Any]:
    return {} if rng.random() < 0.6 else {"phase": rng.choice(("both", "prompt", "decode"))}


def _site(rng: random.Random) -> str:
    return rng.choice(NO_SITES) if rng.random() < 0.05 else rng.choice(SITES)


def _captures(rng: random.Random) -> list[dict[str, Any]]:
    count = rng.choice((1, 1, 2, 5, 5, 40, MAX_CAPTURES, MAX_CAPTURES + 1))
    if count > 5:  # the same one again and again
        return [{"site": _site(rng), "positions": rng.choice(("all", "last", [0]))}] * count
    return [{"site": _site(rng), "positions": _positions(rng), **_phase(rng)} for _ in range(count)]


def _edits(rng: random.Random, results: list[str]) -> list[dict[str, Any]]:
    count = rng.choice((1, 1, 1, 2, 5, MAX_EDITS, MAX_EDITS + 1))
    if count > 5:
        return [_edit(rng, results)] * count
    return [_edit(rng, results) for _ in range(count)]


def _edit(rng: random.Random, results: list[str]) -> dict[str, Any]:
    op = rng.choice(("add", "scale", "set", "project_out", "ablate", "patch", "patch", "clamp"))
    edit: dict[str, Any] = {"site": _site(rng), "op": op, "positions": _positions(rng)}
    edit |= _phase(rng)
    if op in ("add", "set", "project_out"):
        edit["vector"] = _vector(rng)
    if op == "patch":
        id = rng.choice(results) if results and rng.random() < 0.8 else "absent"
        edit["from"] = {"id": id, "site": _site(rng), "positions": _positions(rng)}
    if op == "clamp":
        edit |= {"sae": "absent", "feature": rng.choice((0, 2**31 - 1, 2**31))}
    if rng.random() < 0.4:
        edit["scale"] = rng.choice((0, -1.0, 1e30, -1e30, 1e31, 1e-300))
    return edit


def _vector(rng: random.Random) -> Any:
    match rng.randrange(6):
        case 0:
            return "absent"
        case 1:
            return [1.0] * rng.choice((0, 1, WIDTH - 1, 2**16))
        case 2:
            return [rng.choice((1e30, -1e30, 1e-300, 0.0))] * WIDTH
    return [round(rng.uniform(-1, 1), 2) for _ in range(rng.choice((WIDTH, WIDTH, 1536, 192)))]


def _layers(rng: random.Random, count: int) -> Any:
    match rng.randrange(5):
        case 0:
            return list(range(count))
        case 1:
            return [0] * rng.choice((1025, 1026, 500))
        case 2:
            return []
        case 3:
            return [rng.choice((count, 1024, 1025, -1))]
    return [0, count - 1]


def _top(rng: random.Random) -> int:
    return rng.choice((1, 5, MAX_TOP, MAX_TOP, MAX_TOP + 1, 0))


def _lens(rng: random.Random) -> dict[str, Any]:
    lens = {"layers": rng.choice(("all", _layers(rng, NUM_LAYERS))), "top": _top(rng)}
    if rng.random() < 0.1:
        lens["tuned"] = "absent"
    return lens | {"positions": _positions(rng)} | _phase(rng)


def _attention(rng: random.Random) -> dict[str, Any]:
    heads = {} if rng.random() < 0.5 else {"heads": _layers(rng, NUM_HEADS)}
    return {
        "layers": _layers(rng, NUM_LAYERS),
        "positions": _positions(rng),
        **heads,
        **_phase(rng),
    }


def _attribution(rng: random.Random) -> dict[str, Any]:
    return {
        "target": rng.choice((None, 5, 2**31 - 1, " Paris", "", "x" * 100_000)),
        "position": rng.choice((-1, 0, -(2**24), 2**24)),
        "method": rng.choice(("direct", "direct", "input_x_gradient")),
    }
