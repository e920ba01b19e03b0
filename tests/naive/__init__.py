"""Slow, obvious twins of compiled functions: same name, same answer, no cleverness. What a test compares with.

One file for `graph`, three for `index`. They know lists, dictionaries and arrays, and import nothing of `src`.
"""
