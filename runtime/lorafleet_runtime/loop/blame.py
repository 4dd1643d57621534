"""Who is why a trainer died, by what was under way at that moment; who is failed for it.

Fleet.on_trainer_lost calls it at each death, and the loop whenever something went well. It decides alone: nobody else
counts a death. One run under way is certain to be why; of several, each does alone what it did then, until that went
well, so that the next death is certain. Fleet.keep_company and `train` see to the "alone"; nothing here waits.

    batch, step, snapshot   suspects: their batches, steps and snapshots, one run at a time
    save                    Run.save_deaths > 0: its saves
    load                    Run.load_deaths > 0: its loads
"""

import logging
from collections.abc import Collection

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import RunFault

log = logging.getLogger(__name__)

_TRAINING = frozenset({"batch", "step", "snapshot"})


class Blame:
    """What is known of the deaths of a pool's trainers."""

    def __init__(self, registry: Registry) -> None:
        """No trainer has died."""
        self._registry = registry
        self.suspects: set[str] = set()
        """Runs that were training when the trainer died; they train alone until a step of theirs is through."""
        self.cleared: set[Doing] = set()
        """Saves and loads that were under suspicion and went well alone. Each is believed to be why once: at the next
        death beside it, a suspect that is there too is counted. So the deaths that count for nobody come to an end."""

    def died(self, under_way: Collection[Doing], why: str) -> None:
        """A trainer died; its runs have been told to load again.

        Args:
            under_way: what it worked on.
            why: for people.
        """
        training = {doing.uid for doing in under_way if doing.kind in _TRAINING}
        if training:
            self.training(training, why, {doing for doing in under_way if doing.kind not in _TRAINING})
        for doing in sorted(set(under_way)):
            run = self._registry.runs.get(doing.uid)
            if run is not None and doing.kind == "save":
                self._saving(run, certain=len(under_way) == 1 and run.save_deaths > 0)
            elif run is not None and doing.kind == "load":
                self._loading(run, len(under_way) == 1, why)

    def training(self, uids: Collection[str], why: str, beside: Collection[Doing] = ()) -> None:
        """The trainer died, or raised, while these runs trained: they are suspects.

        Saves and loads under suspicion are made beside no batch, so a suspect is counted beside those that were under
        suspicion before.
        """
        excused = self.suspects.issuperset(uids) and self.cleared.issuperset(beside)
        self.suspects.update(uids)
        log.error("the trainer died while it worked for %s (%s)", ", ".join(sorted(uids)), why)
        run = self._registry.runs.get(next(iter(uids))) if len(uids) == 1 and (excused or not beside) else None
        if run is not None:
            run.crashes += 1
            self._judge(run, run.crashes, "while it trained this run alone", why)

    def _saving(self, run: Run, certain: bool) -> None:
        run.save_deaths += 1
        log.error("run %s: the trainer died while it saved this run", run.uid, extra=about(run.uid))
        if certain:
            self.cleared.discard(Doing("save", run.uid))
            self._judge(run, run.save_deaths, "while it saved this run")

    def _loading(self, run: Run, certain: bool, why: str) -> None:
        run.load_deaths += 1
        log.error("run %s: the trainer died while it loaded this run", run.uid, extra=about(run.uid))
        if certain:
            self.cleared.discard(Doing("load", run.uid))
            self._judge(run, run.load_deaths, "while it loaded this run", why)

    def _judge(self, run: Run, deaths: int, what: str, last: str = "") -> None:
        limit = run.spec.backoff_limit
        if deaths > limit:
            text = f"the trainer died {deaths} times {what}; backoffLimit is {limit}{last and f'; last: {last}'}"
            self._registry.fail(RunFault(run.uid, reasons.TRAINER_CRASHED, text))

    def stepped(self, uid: str) -> None:
        """A step of the run is through, its snapshot too."""
        self.suspects.discard(uid)

    def saved(self, run: Run) -> None:
        """A checkpoint of the run is durable."""
        if run.save_deaths:
            self.cleared.add(Doing("save", run.uid))
            run.save_deaths = 0

    def loaded(self, run: Run) -> None:
        """The trainer holds the run."""
        if run.load_deaths:
            self.cleared.add(Doing("load", run.uid))
            run.load_deaths = 0

    def forget(self, uid: str) -> None:
        """The run left its slot."""
        self.suspects.discard(uid)
        self.cleared -= {Doing("save", uid), Doing("load", uid)}
