"""From text files to index files: reading, tokenising, counting."""
