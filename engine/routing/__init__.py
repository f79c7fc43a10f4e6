"""Models to backends: who answers a request, and why."""
