"""Connects the frontend and the engine process. Modules start the process, send messages over a
socket, and share a heartbeat in memory.
"""
