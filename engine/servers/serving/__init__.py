"""Code shared by all APIs: admission, choice of a model, events of a generation, storage."""
