"""`python -m engine`: the `engine` command, for where its script is not in the path."""

from engine.cli.main import main

if __name__ == "__main__":
    main()
