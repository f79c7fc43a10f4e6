"""Models on disk: the catalogue of known models, downloads, and the model store."""
