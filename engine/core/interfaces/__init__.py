"""Types shared by servers, backends, the engine process and plugins."""
