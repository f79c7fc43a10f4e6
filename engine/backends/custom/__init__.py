"""Our own engine. A server uses two processes: `frontend/` owns text, `worker/` owns token ids, and
`ipc/` connects them. `LLM` runs both in one process.
"""
