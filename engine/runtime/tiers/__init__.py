"""Tiers of the prefix cache: host memory, disk and Redis hold blocks that outlive the KV pool."""
