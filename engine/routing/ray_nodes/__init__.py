"""Nodes in a Ray cluster. Ray places and restarts them; tokens never go through Ray."""
