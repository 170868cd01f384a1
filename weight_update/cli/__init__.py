"""The command ``weight-update``: a file a command, nothing heavy imported before it is needed."""
