"""The `foredraft` command: one file a verb. Only parses and prints; the work is done elsewhere."""
