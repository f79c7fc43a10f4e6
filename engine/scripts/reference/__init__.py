"""Reference implementations, kept because they are simple."""
