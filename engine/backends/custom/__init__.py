"""Our own engine. Two processes when serving: `frontend/` owns text, `worker/` owns token ids,
`ipc/` is between them; `LLM` runs both in one process.
"""
