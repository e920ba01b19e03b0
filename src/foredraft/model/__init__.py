"""Everything that holds weights: the target, its key-value cache, and what its forward passes cost."""
