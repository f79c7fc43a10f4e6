"""Maps names to `"module:attr"` strings, imported on first use. Packages add entries by entry
points.
"""
