"""Registries of backends, models and plugins. They map names to `"module:attr"` strings, which are
imported on first use. Other packages can add entries by entry points.
"""
