"""From text files to index files: reading, tokenising, counting. No torch."""
