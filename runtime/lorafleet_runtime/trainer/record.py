"""Records of a run's optimizer steps, for `lorafleet replay` (recordSteps): what went into each and what came out.

Called by the trainer: `start` at load, `add` while a batch accumulates, `write` at step time before the snapshot of the
step, so that a state at step N always has its record, beside the snapshot; record_moves.py brings it to storage.
Runs no model; record_files.py has the format.
A record that storage refuses is an error for people and never ends a run or a step.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.record_files import (
    FORMAT,
    RUN_FILE,
    Start,
    StepFigures,
    flatten,
    pending_name,
    read_pair,
    remove_pair,
    step_json,
    step_name,
    unflatten,
    write_pair,
    write_start,
)
from lorafleet_runtime.trainer.record_moves import Outbox, at_once
from lorafleet_runtime.types import PromptGroup, VersionId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """The groups of an unfinished step, apart from the recorder: written on another thread than the one that trains."""

    uid: str
    directory: Path
    """On storage."""
    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def write(self) -> None:
        """Write it beside the records. A failure costs the step's record, which then says so, not the checkpoint."""
        try:
            write_pair(self.directory, pending_name(self.about["step"]), self.tensors, self.about)
        except (OSError, SafetensorError) as error:
            log.error("run %s: the unfinished step cannot be recorded in %s (%s)", self.uid, self.directory, error)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The groups of an unfinished step, as a checkpoint left them; or why they cannot be had."""

    groups: Sequence[PromptGroup] = ()
    logprobs: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """By place in `groups`."""
    broken: str = ""


def read_unfinished(uid: str, directory: Path, step: int, groups: int) -> Unfinished:
    """Read what PendingRecord wrote. For any thread.

    Args:
        uid: of the run.
        directory: of its records on storage.
        step: the unfinished step.
        groups: accumulated in it.
    """
    try:
        about, tensors = read_pair(directory, pending_name(step))
        found = (about["step"], len(about["versions"]))
        if found[0] != step or found[1] < groups:  # more: of a later checkpoint that did not become whole
            raise ValueError(f"it holds {found[1]} groups of step {found[0]}, not {groups} of step {step}")
        return Unfinished(*unflatten(uid, about["versions"][:groups], tensors))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        text = f"{pending_name(step)}.safetensors of its first {groups} groups cannot be read: {error}"
        return Unfinished(broken=text)


class StepRecorder:
    """One run's records.

    Args:
        uid: of the run.
        directory: `{run directory}/records`; None on ranks that only keep log-probabilities.
        dtype: of the loss arithmetic, float32 or float64: what advantages and log-probabilities are stored as.
        mask_truncated: the run leaves truncated samples out of the loss.
        outbox: brings the records to `directory`; without one each is written there at once.
    """

    def __init__(
        self, uid: str, directory: Path | None, dtype: torch.dtype, mask_truncated: bool, outbox: Outbox | None = None
    ) -> None:
        self.uid = uid
        self._directory = directory
        self._outbox = outbox or (None if directory is None else Outbox(uid, directory, None, at_once))
        self._dtype = dtype
        self._mask_truncated = mask_truncated
        self._groups: list[PromptGroup] = []
        self._logprobs: dict[int, tuple[Tensor, ...]] = {}
        self._unwritten: Start | None = None
        """The beginning, while storage refuses it."""
        self._broken = ""
        """Why the step in progress cannot be recorded."""

    def start(self, start: Start | None, step: int) -> None:
        """Begin at load: fresh, or behind the step that the run was loaded at. Later records are removed.

        Args:
            start: for a run without any state; None for one that goes on.
            step: that the run was loaded at.
        """
        if self._outbox is None:
            return
        self._unwritten = start
        self._outbox.begin(step, fresh=start is not None)
        self._begin(self._outbox)
        self._outbox.send()

    def close(self) -> str:
        """The run leaves its slot.

        Returns:
            What went wrong since the last step, for people; "" when nothing did. What waits on the node for storage is
            tried once more, and how that goes is in the trainer's log.
        """
        if self._outbox is None:
            return ""
        notes = self._outbox.notes()
        self._outbox.close()
        return f"{_told(notes)}; what waits there was tried once more when the run left its slot" if notes else ""

    def add(
        self, groups: Sequence[PromptGroup], mine: Sequence[PromptGroup], logprobs: Mapping[tuple[int, int], Tensor]
    ) -> None:
        """Groups that were accumulated.

        Args:
            groups: as trained, in order.
            mine: those of them that this rank computed; the others' log-probabilities are on other ranks.
            logprobs: [R] on the host, the trainer's own, by the identities of a prompt and a sample; a sample that took
                no pass has none.
        """
        none, own = torch.empty(0, dtype=self._dtype), {id(group) for group in mine}
        for place, group in enumerate(groups, len(self._groups)):
            if id(group) in own:
                keys = [(id(group.prompt_ids), id(sample)) for sample in group.samples]
                self._logprobs[place] = tuple(logprobs.get(key, none) for key in keys)
        self._groups.extend(groups)

    def _collect(self, ranks: Ranks) -> None:
        """Bring what other data-parallel ranks computed to rank 0; a collective."""
        for part in ranks.gather_from_dp(self._logprobs):
            if ranks.is_first:
                self._logprobs.update(part)

    def discard(self) -> None:
        """Forget the step in progress."""
        self._groups, self._logprobs, self._broken = [], {}, ""

    def write(self, figures: StepFigures, ranks: Ranks) -> str:
        """Write the record of a step, in place of an older one, and send it to storage; a collective.

        Returns:
            What went wrong since the last step, for people; "" when nothing did. The step counts either way.
        """
        self._collect(ranks)
        out = self._outbox
        if out is None:
            return ""
        name, notes = step_name(figures.step), self._begin(out)
        try:
            if self._broken:
                raise OSError(self._broken)
            about = step_json(figures, self._groups)
            write_pair(out.place, name, self._tensors(), about, out.durable)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # an older record of this step would tell of other samples
                remove_pair(out.place, name)
            notes.append(f"the record of step {figures.step} cannot be written to {out.place} ({error})")
        out.send()
        notes = [*out.notes(), *notes]
        return _told(notes)

    def pending(self, step: int, ranks: Ranks) -> PendingRecord | None:
        """The groups of the unfinished step `step`, for a checkpoint that holds their gradient; a collective."""
        self._collect(ranks)
        if self._directory is None or not self._groups or self._broken:
            return None
        about = {"format": FORMAT, "step": step, "versions": [g.version.name for g in self._groups]}
        return PendingRecord(self.uid, self._directory, self._tensors(), about)

    def restore(self, groups: int, unfinished: Unfinished | None) -> None:
        """Take the unfinished step back: its gradient came from a checkpoint.

        Args:
            groups: accumulated in it.
            unfinished: what was read of it, on the rank that writes records.
        """
        self.discard()
        if self._directory is None:
            # the first `groups` places of the step belong to rank 0, which has their record
            self._groups = [_PLACEHOLDER] * groups
        elif unfinished is None or unfinished.broken:
            self._broken = "its first groups were not read" if unfinished is None else unfinished.broken
        else:
            self._groups, self._logprobs = list(unfinished.groups), dict(unfinished.logprobs)

    def _begin(self, out: Outbox) -> list[str]:
        """Write run.json and the initial adapter where they are still to be written. Returns what went wrong."""
        if self._unwritten is None:
            return []
        try:
            write_start(out.place, self._unwritten, out.durable)
        except (OSError, SafetensorError) as error:
            return [f"{out.place / RUN_FILE} and the initial adapter cannot be written ({error})"]
        self._unwritten = None
        return []

    def _tensors(self) -> dict[str, Tensor]:
        return flatten(self._groups, self._logprobs, self._dtype, self._mask_truncated)


def _told(notes: Sequence[str]) -> str:
    return f"recordSteps: {'; '.join(notes)}; replay will stop there; free space or fix it" if notes else ""


_PLACEHOLDER = PromptGroup("", VersionId("", "", 0), -1, (), ())
