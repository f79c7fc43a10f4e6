"""Tensor parallelism: which axis of each parameter is spread over a mesh's devices.

Matrices that make heads or inner values are cut by rows, those that take them by columns, so that
each half of a block ends with one sum over the devices. XLA inserts the sums.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.backends.custom.architectures.base import ModelConfig
from engine.core.errors import ConfigError

AXIS = "model"
BY_ROWS = frozenset({"q", "k", "v", "gate", "up"})
BY_COLUMNS = frozenset({"o", "down"})


def make_mesh(devices: list[jax.Device], config: ModelConfig) -> Mesh | None:
    """None for a single device. Raises `ConfigError` if the model cannot be cut so often."""
    count = len(devices)
    if count == 1:
        return None
    shared = {"key heads": config.num_kv_heads, "feed-forward values": config.intermediate_size}
    for name, size in shared.items():
        if size % count:
            raise ConfigError(
                f"the model's {size} {name} cannot be shared evenly by {count} devices; "
                "use a number of devices that divides them"
            )
    return Mesh(np.array(devices), (AXIS,))


def param_spec(name: str) -> P:
    """By a weight's name, such as "layers.3.attn.q.bias"."""
    *_, part, kind = name.split(".")
    if part in BY_ROWS:
        return P(AXIS)
    return P(None, AXIS) if part in BY_COLUMNS and kind == "weight" else P()


CACHE_SPEC = P(None, None, AXIS)  # (slots, 2, K, H)


def home(spec: P, mesh: Mesh | None, device: jax.Device) -> jax.Device | NamedSharding:
    """Of an array: spread over the mesh, or whole on the device if there is none."""
    return device if mesh is None else NamedSharding(mesh, spec)
