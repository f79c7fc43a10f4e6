"""`engine triton`: this server as a model of a Triton server."""
