"""Drives an engine step by step, for profiles, benchmarks and inspection. The server does not
import this package.
"""
