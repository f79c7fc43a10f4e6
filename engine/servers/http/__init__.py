"""The HTTP layer: connection limits, request log, protection against web pages, request bodies,
errors, and server-sent events.
"""
