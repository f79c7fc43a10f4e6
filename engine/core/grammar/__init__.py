"""Structured output: JSON Schema, regular expressions and GBNF as grammars, checked in a limited
child.
"""
