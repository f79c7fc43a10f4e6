"""Between frontend and engine: message frames, the child process, its heartbeat in shared
memory.
"""
