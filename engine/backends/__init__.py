"""Backends answer requests with typed events. `base.py` has their interface. `factory.py` makes a
backend by name.
"""
