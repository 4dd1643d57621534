"""The runtime's HTTP API."""
