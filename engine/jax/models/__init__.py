"""The decoder as a pure function of a pytree of weights, and the code that loads the weights."""
