"""Authentication and limits: API keys, quotas, rate windows."""
