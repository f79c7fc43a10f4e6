"""Registries of backends, models and plugins. A registry maps names to `"module:attr"` strings,
which are imported on first use. Other packages can add names through entry points.
"""
