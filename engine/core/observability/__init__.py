"""Prometheus metrics, logs, and the memory and CPU of our processes."""
