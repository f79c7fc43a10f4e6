"""The kernels of `--numerics invariant`. A token's result does not depend on the other tokens of
its step.

Each sum has one fixed order. For a matmul, the weight's shape decides it. For attention, the
positions of the keys decide it. Tile sizes may depend on the number of tokens, because they do not
change the order of any sum.
"""

from engine.torch.kernels.invariant import linear

__all__ = ["linear"]
