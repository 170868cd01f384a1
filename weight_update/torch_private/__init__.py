"""Everything private in torch that the library relies on, in one place."""
