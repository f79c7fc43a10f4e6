"""Commands that look at, or change, a running server: `engine admin`, `engine keys`, `engine
top`.
"""
