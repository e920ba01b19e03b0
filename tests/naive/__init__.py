"""Slow, simple twins of compiled functions, with the same name and result, for tests to compare with.

One file for `graph`, three for `index`, and one for operations of the compiled forward. They use lists, dictionaries
and arrays, and import nothing from `src`.
"""
