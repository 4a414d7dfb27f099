"""`python -m syncline.scheduler_core.simulate`."""

import sys

from syncline.scheduler_core.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
