"""The `engine` command. Each subcommand has its own module, which is imported when the subcommand
is used.
"""

import time

BEGAN_AT = time.monotonic()  # when the command started, before it imports its other modules
