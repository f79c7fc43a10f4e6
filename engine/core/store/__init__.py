"""Models on disk: the catalogue, downloads, and the model store."""
