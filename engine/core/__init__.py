"""What every backend and the server share; light libraries only, no framework."""
