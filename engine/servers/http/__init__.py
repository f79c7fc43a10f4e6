"""What every HTTP request passes: connection limits, the log, the browser guard, bodies, errors,
SSE.
"""
