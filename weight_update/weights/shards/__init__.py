"""Sharded trainers: whole values from the parts that ranks hold."""
