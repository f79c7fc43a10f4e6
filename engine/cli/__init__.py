"""The `engine` command: one module per subcommand, imported when it is used."""

import time

BEGAN_AT = time.monotonic()  # before any other module of the command is imported
