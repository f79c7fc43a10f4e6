"""Between frontend and engine process: message frames, process start, heartbeat in shared
memory.
"""
