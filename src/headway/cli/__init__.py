"""The `headway` command, one file a subcommand; torch-free."""
