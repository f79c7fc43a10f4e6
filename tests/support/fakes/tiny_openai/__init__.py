"""A small server that keeps every rule of the conformance kit, over a model that knows ten words.

It exists to be broken: a test says which part of which answer is wrong, and the kit must notice.
"""
