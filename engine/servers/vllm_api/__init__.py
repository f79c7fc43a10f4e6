"""vLLM's own endpoints, by what this server has. `server.dialects` turns them off."""
