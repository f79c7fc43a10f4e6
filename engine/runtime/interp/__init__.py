"""Interpretability in the engine process: what requests read and change inside the steps."""
