"""Slow, obvious twins of compiled functions: same name, same answer, no cleverness. What a test compares with.

One file a package of `src`, three for `index`. They know lists, dictionaries and arrays, and import nothing of `src`.
"""
