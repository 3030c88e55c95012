"""`python -m prefetch_runtime`: the command, where its script is not on the path."""

from prefetch_runtime.cli import main

if __name__ == "__main__":
    main()
