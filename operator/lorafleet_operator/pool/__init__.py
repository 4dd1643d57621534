"""Connections to the runtimes of AdapterPools."""
