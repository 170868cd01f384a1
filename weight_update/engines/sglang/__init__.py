"""SGLang servers: what they say, what they can do, and what they are told."""
