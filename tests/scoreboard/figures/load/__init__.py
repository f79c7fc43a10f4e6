"""Figures about many clients, slow clients and long runs."""
