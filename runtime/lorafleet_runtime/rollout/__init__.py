"""Turns a prompt row and an engine into a scored prompt group."""
