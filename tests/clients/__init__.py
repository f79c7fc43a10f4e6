"""Other people's clients, run for real against our server, by `make test-clients`."""
