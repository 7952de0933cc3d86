"""The command `syncline`: one file per command."""
