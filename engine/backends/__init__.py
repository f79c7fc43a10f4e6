"""Backends: each one turns requests into typed events. `base.py` has the interface, `factory.py`
makes a backend by name.
"""
