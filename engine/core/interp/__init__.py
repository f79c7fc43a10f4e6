"""Interpretability requests as clients send them, for the server and for `LLM`: the `interp`
object, named vectors, and results.
"""
