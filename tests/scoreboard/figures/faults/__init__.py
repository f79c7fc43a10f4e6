"""Figures about what is killed, frozen, broken or full."""
