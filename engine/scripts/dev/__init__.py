"""Developer scripts: run a file of this folder with Python, or with `engine dev NAME`."""
