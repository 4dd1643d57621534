"""`lorafleet logs RUN [-f]`: the runtime's own log of one run, also of a finished one."""

import asyncio
import datetime
import json
import sys
from typing import Any

from rich.console import Console

from lorafleet_api.v1alpha1 import reasons
from lorafleet_cli import facts
from lorafleet_cli.errors import CliError, UnknownRun
from lorafleet_cli.kube import Kube, Object
from lorafleet_cli.patience import Patience
from lorafleet_cli.runtime import open_runtime

_POLL_SECONDS = 1.0
_FIGURES = {
    "reward": "reward",
    "lr": "lr",
    "gradNorm": "grad norm",
    "tokens": "tokens",
    "entropy": "entropy",
    "klSampler": "KL to sampler",
    "klBase": "KL to base",
    "clipFraction": "clipped",
    "tisFraction": "TIS",
}


async def logs(kube: Kube, console: Console, name: str, *, follow: bool, as_json: bool) -> None:
    """Print the log; with `follow` go on until the run is deregistered or deleted."""
    run = await kube.run(name)
    after = await _print_new(kube, console, run, None, as_json)
    patience = Patience()
    told = False
    while follow:
        try:
            over = await _over(kube, run)  # before the last reading: what is written until then is still printed
            after = await _print_new(kube, console, run, after, as_json)
        except CliError as error:
            if not patience.bears(error):
                raise
            if not told:
                print(f"waiting: {error}", file=sys.stderr)
            told = True
        else:
            patience.heard()
            told = False
            if over:
                return
        await asyncio.sleep(_POLL_SECONDS)


async def _print_new(kube: Kube, console: Console, run: Object, after: str | None, as_json: bool) -> str:
    """A connection for each reading: a runtime that restarts may come back elsewhere."""
    async with open_runtime(kube, await kube.pool_of(run)) as runtime:
        found = await runtime.get(run, "log", after=after)
    for entry in found["entries"]:
        console.print(json.dumps(entry) if as_json else facts.printable(line(entry)), markup=False, soft_wrap=True)
    if after is None and not found["entries"]:
        print("the runtime has written nothing about this run yet", file=sys.stderr)
    return str(found["next"])


async def _over(kube: Kube, run: Object) -> bool:
    try:
        now = await kube.run(run["metadata"]["name"])
    except UnknownRun:
        return True
    return now["metadata"]["uid"] != run["metadata"]["uid"] or facts.holds(now, reasons.DEREGISTERED)


def line(entry: dict[str, Any]) -> str:
    """One entry for people; more text, as a traceback, is indented below it."""
    at = datetime.datetime.fromtimestamp(entry["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    level = "" if entry["level"] == "INFO" else f"{entry['level']} "
    figures = ""
    for key, label in _FIGURES.items():
        value = entry.get(key)
        if value is not None:
            figures += f"  {label} {value if isinstance(value, str) else facts.number(value)}"
    detail = "".join(f"\n    {text}" for text in str(entry.get("detail") or "").rstrip().splitlines())
    return f"{at}  {level}{entry['message']}{figures}{detail}"
