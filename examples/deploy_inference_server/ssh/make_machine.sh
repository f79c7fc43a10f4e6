#!/bin/sh
# A machine with a GPU by SkyPilot, for `engine deploy --provision`. It is billed until `sky down engine-gpu`.
set -e
sky launch --yes --detach-run --cluster engine-gpu --gpus "${GPU:-L4:1}" >&2
echo engine-gpu    # SkyPilot adds this name to the SSH configuration
