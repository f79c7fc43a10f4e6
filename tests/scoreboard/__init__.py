"""What the server withstands, in figures with limits: `make scoreboard`, and docs/scoreboard.md."""
