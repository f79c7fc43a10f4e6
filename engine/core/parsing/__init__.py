"""Parses model output into reasoning, tool calls and text while the output is generated."""
