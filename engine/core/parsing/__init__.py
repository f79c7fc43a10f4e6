"""A model's output as reasoning, tool calls and text, parsed as it arrives."""
