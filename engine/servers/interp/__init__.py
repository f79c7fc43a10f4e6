"""The API for interpretability, `/v1/interp`."""
