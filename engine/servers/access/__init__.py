"""Who may ask and how much: API keys, quotas, rate windows."""
