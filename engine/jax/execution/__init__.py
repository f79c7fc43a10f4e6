"""The JAX model runner, with its shape buckets, compiled steps, sampling and sharding."""
