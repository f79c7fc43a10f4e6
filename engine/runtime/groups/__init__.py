"""Memory of sequences that is not in the block tables of all tokens, such as windowed blocks, and
of their adapters.
"""
