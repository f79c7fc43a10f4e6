"""Code that all APIs share: admission, choice of a model, reading the backend's events
and streaming them.
"""
