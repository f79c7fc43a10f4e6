"""The Files API: private bytes on disk, metadata in SQLite."""
