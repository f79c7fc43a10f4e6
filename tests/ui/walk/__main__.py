"""`make walk`: long walks with new seeds. The plan of a walk that fails is kept, and tested from
then on.
"""

import argparse
import sys
import time

from tests.ui.walk.walker import Walker, keep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first one")
    parser.add_argument("--shrink", action="store_true", help="look for a shorter plan")
    given = parser.parse_args()
    walker, num_failed = Walker(), 0
    for seed in range(given.seed, given.seed + given.walks):
        failure = walker.walk({"seed": seed, "steps": given.steps, "shrink": given.shrink})
        print(f"seed {seed}:", "passed" if failure is None else failure["told"], flush=True)
        if failure is not None:
            keep(failure["plan"], seed)
            num_failed += 1
    walker.close()
    print(f"{num_failed} of {given.walks} walks failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
