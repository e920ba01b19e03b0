"""foredraft inside the tools people already use: transformers' `generate`, and vLLM."""
