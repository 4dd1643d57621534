"""`lorafleet-runtime head | serve`: parse, set up logging, import, run."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lorafleet_runtime.config.config import load_config
from lorafleet_runtime.errors import ConfigError

app = typer.Typer(help="The LoraFleet runtime: one trainer, its engines and their runs.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Option("--config", help="AdapterPool spec plus port, token file, storage root.")]


@app.command()
def head(config: ConfigFile) -> None:
    """Start the Ray head and keep `serve` running; the head pod and the one-machine edition run this."""
    from lorafleet_runtime.cli.head import supervise

    _logging()
    raise SystemExit(_or_explain(lambda: supervise(config, load_config(config))))


@app.command()
def serve(config: ConfigFile, ray_address: Annotated[str, typer.Option(help="HOST:PORT of the Ray head.")]) -> None:
    """Run registry, HTTP API and driver loop against a running Ray."""
    from lorafleet_runtime.cli.serve import run

    _logging()
    raise SystemExit(_or_explain(lambda: run(load_config(config), ray_address)))


def _or_explain(command: Callable[[], int]) -> int:
    try:
        return command()
    except ConfigError as error:
        print(f"lorafleet-runtime: {error}", file=sys.stderr)
        return 2


def _logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
