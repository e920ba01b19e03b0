"""Layers that keep a state instead of keys and values: convolutions and recurrences, verified along chains and trees."""
