"""LoRA: merged weights, one layer at a time, and adapters by themselves."""
