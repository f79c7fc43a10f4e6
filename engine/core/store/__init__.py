"""Models on this disk: the catalogue, downloads, and what is stored where."""
