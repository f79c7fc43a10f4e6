"""Structured output: converts JSON Schema, regex and GBNF to grammars, and test-compiles them in a
limited child process.
"""
