"""What foredraft knows about text, as sorted arrays: tables, learned counts and the searches over them. No torch."""
