"""The model's forward compiled for this machine, or recorded on a CUDA device; the same scores in less time."""
