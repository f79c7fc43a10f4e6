"""Small helpers that fit no other folder."""
