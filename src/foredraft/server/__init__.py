"""An HTTP server for one machine: OpenAI's and Anthropic's routes, which share one batch, and a web page."""
