"""Helpers that fit no other folder: binding sockets, and suggestions for misspelt names."""
