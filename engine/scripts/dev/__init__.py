"""The workshop: run a file of this folder with Python, or by `engine dev NAME`."""
