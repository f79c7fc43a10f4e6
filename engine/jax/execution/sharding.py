"""Tensor parallelism: the axis along which each parameter is sharded over the devices.

The matrices for q, k, v, gate and up are sharded by rows. The output and down projections are
sharded by columns. Attention and MLP then each need one all-reduce at the end, which XLA inserts.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.architectures.base import ModelConfig
from engine.core.errors import ConfigError

AXIS = "model"
BY_ROWS = frozenset({"q", "k", "v", "gate", "up"})
BY_COLUMNS = frozenset({"o", "down"})


def make_mesh(devices: list[jax.Device], config: ModelConfig) -> Mesh | None:
    """A mesh of the devices, or None for a single device. Raises `ConfigError` if the model's KV
    heads or its feed-forward width cannot be divided evenly among the devices, or if it has
    experts.
    """
    count = len(devices)
    if count == 1:
        return None
    if config.experts is not None:
        raise ConfigError("a mixture of experts runs on one JAX device; name one device")
    shared = {"key heads": config.num_kv_heads, "feed-forward values": config.intermediate_size}
    for name, size in shared.items():
        if size % count:
            raise ConfigError(
                f"the model's {size} {name} cannot be shared evenly by {count} devices; "
                "use a number of devices that divides them"
            )
    return Mesh(np.array(devices), (AXIS,))


def param_spec(name: str) -> P:
    """How a weight is sharded. `name` is for example "layers.3.attn.q.bias"."""
    *_, part, kind = name.split(".")
    if part in BY_ROWS:
        return P(AXIS)
    return P(None, AXIS) if part in BY_COLUMNS and kind == "weight" else P()


CACHE_SPEC = P(None, None, AXIS)  # (slots, 2, K, H)


def home(spec: P, mesh: Mesh | None, device: jax.Device) -> jax.Device | NamedSharding:
    """Where to place an array: sharded over the mesh, or on `device` if there is no mesh."""
    return device if mesh is None else NamedSharding(mesh, spec)
