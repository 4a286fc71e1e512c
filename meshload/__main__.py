"""`python -m meshload` is the command line."""

from .cli import main

main()
