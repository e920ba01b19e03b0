"""From text files to index files: reading, tokenising, counting. Does not depend on torch."""
