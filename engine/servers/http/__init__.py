"""The HTTP layer: connection limits, request log, protection against DNS rebinding and CSRF,
request bodies, errors, and the records of requests.
"""
