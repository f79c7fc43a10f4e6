"""Measures live servers: `benchmarks.run` compares several, `benchmarks.load` drives one."""
