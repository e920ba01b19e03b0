"""An HTTP server for one machine: the routes of OpenAI and Anthropic over one batch, and a page."""
