"""`lorafleet samples RUN [--step N]`: what the model wrote in one optimizer step, and what it was paid."""

import json
import textwrap
from typing import Any

from rich.console import Console

from lorafleet_cli import facts
from lorafleet_cli.kube import Kube
from lorafleet_cli.runtime import open_runtime


async def samples(kube: Kube, console: Console, name: str, *, step: int | None, as_json: bool) -> None:
    """Print the groups of a step; of the newest recorded one when `step` is None."""
    run = await kube.run(name)
    async with open_runtime(kube, await kube.pool_of(run)) as runtime:
        found = await runtime.get(run, "samples", step=step)
    text = json.dumps(found, indent=2) if as_json else facts.printable(render(found))
    console.print(text, markup=False, soft_wrap=True)


def render(found: dict[str, Any]) -> str:
    """A step's groups for people."""
    shown = sum(len(group["samples"]) for group in found["prompts"])
    whole = "" if shown == found["samples"] else f" (the first {shown} are kept)"
    parts = [f"Step {found['step']}: {found['groups']} prompts, {found['samples']} samples{whole}"]
    for group in found["prompts"]:
        parts.append(f"\nPrompt {group['index']}, sampled by version {group['version']}:")
        parts.append(textwrap.indent(group["prompt"], "    "))
        for sample in group["samples"]:
            cut = ", cut at maxTokens" if sample["truncated"] else ""
            parts.append(
                f"  reward {facts.number(sample['reward'])}, advantage {sample['advantage']:+.3f}, "
                f"{sample['tokens']} tokens{cut}:"
            )
            parts.append(textwrap.indent(sample["text"], "    ", lambda line: True))
    return "\n".join(parts)
