"""foredraft inside other libraries: transformers' `generate`, and vLLM."""
