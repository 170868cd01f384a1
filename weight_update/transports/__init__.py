"""How bytes move from the trainer to the engines."""
