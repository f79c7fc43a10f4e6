"""The `engine` command: a module for each command, imported when it is used."""

import time

BEGAN_AT = time.monotonic()  # nothing of the command has been loaded before this
