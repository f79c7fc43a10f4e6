"""An engine driven step by step, for profiles, benchmarks and inspection; the server imports none
of it.
"""
