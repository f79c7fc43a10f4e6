"""Backends: whatever turns a request into typed events. `base.py` has the interface, `factory.py`
makes one by name.
"""
