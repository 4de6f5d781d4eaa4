"""Entry point of `python -m headway`, which runs the `headway` command."""

from headway.cli.main import main

main()
