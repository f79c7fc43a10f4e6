"""Structured output: converts JSON schemas, regular expressions and GBNF to llguidance grammars,
and test-compiles the grammars in a child process with limits.
"""
