"""Commands for a running server and its files: `admin`, `bench`, `keys`, `plugins`, `ps`, `top`."""
