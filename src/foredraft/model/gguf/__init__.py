"""GGUF files: their metadata, tokenizer and weights as transformers folders."""
