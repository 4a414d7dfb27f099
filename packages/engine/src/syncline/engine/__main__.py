"""`python -m syncline.engine` is the `syncline` command."""

from syncline.engine.cli import main

if __name__ == "__main__":
    main()
