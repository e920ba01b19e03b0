"""Measuring and proving: paired runs, replay without a model, losslessness."""
