"""Operating a server: probes, metrics, administration, settings read again."""
