"""The runtime's configuration file."""
