"""Training the heads that draft: traces of the target's own texts, and one loop."""
