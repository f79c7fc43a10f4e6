"""Conversations in the terminal: `engine run`, `engine chat` and `engine generate`."""
