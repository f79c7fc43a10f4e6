"""Prometheus metrics, logs, and resource use of our processes."""
