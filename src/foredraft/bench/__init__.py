"""Benchmarks and proofs: paired runs, replay without a model, and tests that drafting is lossless."""
