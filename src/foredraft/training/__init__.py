"""Training what foredraft ships or needs: the embedded model, and later draft heads."""
