"""From any trainer to named tensors, and from those to a plan of buckets."""
