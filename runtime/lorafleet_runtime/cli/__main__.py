"""`python -m lorafleet_runtime.cli`."""

from lorafleet_runtime.cli.main import app

app()
