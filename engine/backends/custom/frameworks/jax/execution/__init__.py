"""The JAX model runner: shape buckets, the compiled step, sampling, sharding."""
