"""The connection between frontend and engine process: message frames, the start of the process, and
a heartbeat in shared memory.
"""
