"""Commands for engines on several machines."""
