"""Engines on other machines. A node joins a running server over one connection, and its engine gets
requests like the server's own.
"""
