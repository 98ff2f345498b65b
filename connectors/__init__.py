"""The only code that imports vLLM: the connector and its two sides."""
