"""Routes for operating the server: probes, metrics, administration, reloading settings."""
