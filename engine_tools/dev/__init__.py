"""Scripts for developers. Run a file of this folder with Python, or with `engine dev NAME`."""
