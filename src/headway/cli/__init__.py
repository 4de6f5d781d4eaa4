"""The `headway` command. Its modules load without torch, except for the checks that run on every rank."""
