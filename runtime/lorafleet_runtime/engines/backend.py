"""What an engine needs of the server that computes: the border between our bookkeeping and vLLM.

`compat.VllmBackend` implements it; tests of the bookkeeping use one that computes nothing. Imports no torch or vllm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.types import Completion, SamplingParams


class EngineDead(Retryable):
    """The engine process is gone and everything in it; start a new engine."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as the server knows it. All three are unique and never reused: vLLM compares adapters by name,
    caches weights by id, and caches prompts by name and path."""

    id: int
    """From 1."""
    name: str
    path: str
    """PEFT directory."""


class Backend(Protocol):
    """A server of one base model with many adapters. Every call raises EngineDead once the server is gone."""

    @property
    def dead(self) -> bool:
        """The server is gone for good."""
        ...

    async def load(self, adapter: Adapter) -> None:
        """Make the adapter resident; any exception means that it is not usable."""
        ...

    async def unload(self, adapter_id: int) -> None:
        """Drop the adapter; an unknown id is fine."""
        ...

    async def loaded(self) -> set[int]:
        """Ids that are resident now, by the server's own word."""
        ...

    async def generate(
        self, request_id: str, adapter: Adapter | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """Sample params.n completions; cancelling the call aborts the request.

        Raises:
            ValueError: the server refuses prompt or parameters.
        """
        ...

    def close(self) -> None:
        """End the server's processes."""
        ...
