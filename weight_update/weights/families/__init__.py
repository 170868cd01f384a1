"""Model families: the names and layouts of their checkpoints."""
