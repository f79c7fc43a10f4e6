import time

BEGAN_AT = time.monotonic()  # nothing of the command has been loaded before this
