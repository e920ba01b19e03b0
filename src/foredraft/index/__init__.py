"""Text statistics as sorted arrays: tables, learned counts, datastores and searches in them. Does not import torch."""
