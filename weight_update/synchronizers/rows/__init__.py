"""The rows of the factory's table: a file an engine."""
