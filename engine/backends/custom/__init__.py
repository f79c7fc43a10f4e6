"""Our own engine. A server has two processes: the frontend (`frontend/`) handles text, and the
engine process (`worker/`) handles token ids. `ipc/` connects them. The class `LLM` runs both parts
in one process.
"""
