"""Routes each request to one of a model's backends, and records why."""
