"""Layers that keep a state instead of keys and values, and are verified along chains and trees all the same."""
