"""The decoding loop over ids and arrays. Knows no text, no files, and no particular drafter."""
