"""A demo: a tiny policy learns to count because its weights reach a live engine every step."""
