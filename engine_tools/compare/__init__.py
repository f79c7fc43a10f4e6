"""Sends the same prompts to several backends and compares their answers and speed."""
