"""The MLPs of experts over tokens that are sorted by expert.

Letters: M tokens, one per chosen expert of each token of the step; E experts; X size of an expert.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.jax.layers.linear import Params, precision
from engine.jax.layers.mlp import gated

# `ragged_dot_general` for tokens (M, in) and matrices (E, out, in). Experts divide the tokens.
BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)
MIN_RUN, MAX_RUN = 8, 32  # tokens of one expert that are computed together on a CPU


class ExpertBackend(Protocol):
    def __call__(self, params: Params, activation: str, x: Array, sizes: Array) -> Array:
        """x (M, D) -> (M, D). The first sizes[0] tokens belong to expert 0, the next sizes[1]
        tokens to expert 1, and so on. A token's result does not depend on other tokens.
        """
        ...


def ragged_experts(params: Params, activation: str, x: Array, sizes: Array) -> Array:
    """Ragged dots: each is one call for all experts. GPUs and TPUs have kernels for them."""
    of_token = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))

    def dot(name: str, x: Array) -> Array:
        weight = params[name]["weight"]
        y = lax.ragged_dot_general(x, weight, sizes, BY_EXPERT, precision=precision(x.dtype))
        return y + params[name]["bias"][of_token] if "bias" in params[name] else y

    return dot("down", gated(activation, dot("gate", x), dot("up", x)))


def looped_experts(params: Params, activation: str, x: Array, sizes: Array) -> Array:
    """A loop over runs of at most `size` tokens of one expert. On a CPU, XLA computes a ragged dot
    as if every token had chosen every expert; this loop reads only the chosen experts.
    """
    size = min(MAX_RUN, max(MIN_RUN, len(x) // len(sizes)))
    ends = jnp.cumsum(sizes)
    run_counts = (sizes + size - 1) // size
    run_ends = jnp.cumsum(run_counts)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def one_run(run: Array, out: Array) -> Array:
        expert = jnp.searchsorted(run_ends, run, side="right")
        own = jax.tree.map(lambda each: each[expert], params)
        earlier = run - (run_ends - run_counts)[expert]  # runs of the same expert
        start = (ends - sizes)[expert] + earlier * size

        def dot(name: str, x: Array) -> Array:
            y = jnp.dot(x, own[name]["weight"].T, precision=precision(x.dtype))
            return y + own[name]["bias"] if "bias" in own[name] else y

        read = lax.dynamic_slice_in_dim(padded, start, size)
        y = dot("down", gated(activation, dot("gate", read), dot("up", read)))
        # A run may reach into the tokens of the next run, which then writes its own results there.
        return lax.dynamic_update_slice_in_dim(out, y, start, 0)

    return lax.fori_loop(0, run_ends[-1], one_run, jnp.zeros_like(padded))[: len(x)]


def expert_backend() -> ExpertBackend:
    return looped_experts if jax.default_backend() == "cpu" else ragged_experts
