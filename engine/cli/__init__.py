"""The `engine` command. Each subcommand has its own module, which is imported when the subcommand
is used.
"""

import time

BEGAN_AT = time.monotonic()  # start time, taken before other modules of the command are imported
