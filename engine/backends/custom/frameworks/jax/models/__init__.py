"""The decoder as a pure function over a pytree of weights, and how the weights are loaded."""
