"""What TorchRL's collectors need of a weight update: they drive it, count it, and sample."""
