"""HTTP layers that every request passes: connection limits, log, browser guard, bodies, errors,
SSE.
"""
