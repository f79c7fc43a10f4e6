"""Robustness figures of the server, each with limits: `make scoreboard`, and docs/scoreboard.md."""
