"""`engine eval`: asks models the questions of a file and counts the right answers."""
