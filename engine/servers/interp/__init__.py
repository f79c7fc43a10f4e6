"""The API for interpretability: `interp` on chats and completions, and `/v1/interp`."""
