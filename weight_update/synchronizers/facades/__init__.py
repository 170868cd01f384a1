"""Facades that make plain trainers and servers fit the synchronizers."""
