"""The `headway` command. Its modules do not import torch, except for the checks that run on every rank."""
