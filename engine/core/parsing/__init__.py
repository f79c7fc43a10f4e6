"""Parses model output into reasoning, tool calls and text as it arrives."""
