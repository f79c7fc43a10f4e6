"""One module for each figure, or for a few that share their load; each is found by being here."""
