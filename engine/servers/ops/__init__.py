"""Operation: probes, metrics, administration, reloading settings."""
