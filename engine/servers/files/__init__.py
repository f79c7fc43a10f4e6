"""The Files API. The bytes of files are in a private directory, their metadata in SQLite."""
