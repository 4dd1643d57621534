"""What a step's record says of itself, checked against its own arrays, run.json and the record before it.

Called by replay_records.py. Pure: reads no file. Everything here follows from something else in the record; rewards,
prompts and who sampled follow from nothing and are taken on trust (docs/replay.md, What it does not prove).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from lorafleet_cli.replay_math import advantages

if TYPE_CHECKING:
    from lorafleet_cli.replay_records import Step

_ROUNDING = 2.0**-52
"""Of each addition in a mean of rewards, whose sum may be formed in another order; relative to the largest reward."""


class Contradiction(Exception):
    """Two things in the files of a run cannot both be true."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """Which prompt groups of the run's stream are used up after a step: all below `low`, and `above`."""

    low: int
    above: frozenset[int]

    @classmethod
    def parse(cls, cursor: dict[str, Any]) -> Self:
        """Of `cursor` in a record.

        Raises:
            Contradiction: it is none: `consumed` must rise and lie above `low`.
        """
        low, consumed = cursor["low"], cursor["consumed"]
        if low < 0 or any(a >= b for a, b in pairwise([low, *consumed])):
            raise Contradiction(f"cursor has low {low} and consumed {consumed}, which must rise above low")
        return cls(low, frozenset(consumed))

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.low or index in self.above

    def holds(self, earlier: "Consumed") -> bool:
        """Whether all that was used up earlier still is: nothing is ever given back at a step."""
        return self.low >= earlier.low and all(index in self for index in earlier.above)


def check_step(step: "Step", about: dict[str, Any], run: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Check everything in a record that follows from something else.

    Args:
        step: the record's arrays, and its figures.
        about: its JSON.
        run: run.json.
        before: JSON of the step before; None where that has no record.

    Raises:
        Contradiction: the first thing that does not fit.
        KeyError, TypeError, ValueError: a field is missing or of another type.
    """
    _check_sizes(step, run)
    _check_figures(step, about)
    _check_denominator(step, run)
    _check_versions(step, about, run, before)
    _check_places(step, about, before)
    _check_advantages(step, run["algorithm"])


def _check_sizes(step: "Step", run: dict[str, Any]) -> None:
    wanted, most = run["rolloutBatchSize"], run["sampling"]["maxTokens"]
    if len(step.groups) != wanted:
        raise Contradiction(f"it holds {len(step.groups)} groups, rolloutBatchSize is {wanted}")
    samples = run["nSamplesPerPrompt"]
    for place, group in enumerate(step.groups):
        where = f"group {group.index} (place {place})"
        if len(group.samples) != samples:
            raise Contradiction(f"{where} holds {len(group.samples)} samples, nSamplesPerPrompt is {samples}")
        longest = max(len(sample.token_ids) for sample in group.samples)
        if longest > most:
            raise Contradiction(f"{where} holds a response of {longest} tokens, maxTokens is {most}")


def _check_figures(step: "Step", about: dict[str, Any]) -> None:
    samples = [sample for group in step.groups for sample in group.samples]
    rewards = [sample.reward for sample in samples]
    counts = {"groups": len(step.groups), "samples": len(samples), "tokens": sum(len(s.token_ids) for s in samples)}
    for name, wanted in counts.items():
        if about[name] != wanted:
            raise Contradiction(f"{name} is {about[name]}, its arrays give {wanted}")
    mean = math.fsum(rewards) / len(rewards)
    if not abs(about["rewardMean"] - mean) <= _ROUNDING * len(rewards) * max(map(abs, rewards)):
        raise Contradiction(f"rewardMean is {about['rewardMean']:.6g}, its rewards give {mean:.6g}")


def _check_denominator(step: "Step", run: dict[str, Any]) -> None:
    counted = [s for group in step.groups for s in group.samples if s.in_loss]
    by_tokens = run["algorithm"]["lossReduction"] == "tokenMean"
    wanted = sum(len(s.token_ids) for s in counted) if by_tokens else len(counted)
    if step.denominator != wanted:
        raise Contradiction(f"denominator is {step.denominator}, its samples give {wanted}")


def _check_versions(step: "Step", about: dict[str, Any], run: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Who is said to have sampled: versions of this run that existed by then. That they did is taken on trust."""
    names, made_by = about["versions"], _registration(about["incarnation"])
    if before is not None and made_by < _registration(before["incarnation"]):
        raise Contradiction(
            f"incarnation is {about['incarnation']}, the step before was made in the later {before['incarnation']}"
        )
    if len(names) != len(step.groups):
        raise Contradiction(f"versions names {len(names)} groups, its arrays hold {len(step.groups)}")
    for group, name in zip(step.groups, names, strict=True):
        match = re.fullmatch(r"(.+)@(\d+\.\d+)\.v(\d+)", name)
        if match is None or match[1] != run["uid"]:
            raise Contradiction(f"group {group.index} is of version {name!r}, which is none of run {run['uid']}")
        # the first version of a registration is 1, each step makes the next; none is made before it is registered
        if not 1 <= int(match[3]) <= step.number or _registration(match[2]) > made_by:
            raise Contradiction(
                f"group {group.index} is of version {name!r}, which did not exist before step {step.number} of"
                f" incarnation {about['incarnation']}"
            )


def _registration(incarnation: str) -> tuple[int, ...]:
    """Boot epoch and counter of an incarnation "7.2": it rises with each registration of a run."""
    if re.fullmatch(r"\d+\.\d+", incarnation) is None:
        raise Contradiction(f"incarnation is {incarnation!r}, not EPOCH.COUNTER")
    return tuple(map(int, incarnation.split(".")))


def _check_places(step: "Step", about: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Where in the prompt stream the groups are: used up by this step, and by none before."""
    after = Consumed.parse(about["cursor"])
    earlier = Consumed.parse({"low": 0, "consumed": []} if before is None else before["cursor"])
    if not after.holds(earlier):
        raise Contradiction("its cursor lacks groups that the cursor of the step before has")
    indices = [group.index for group in step.groups]
    if len(set(indices)) != len(indices):
        raise Contradiction(f"group_index {_twice(indices)} is there more than once")
    for index in indices:
        if index not in after:
            raise Contradiction(f"group_index {index} is not among the groups that its cursor says are used up")
        if index in earlier:
            raise Contradiction(f"group_index {index} was used up before this step, by the cursor of the step before")


def _twice(indices: Sequence[int]) -> int:
    return next(index for index in indices if indices.count(index) > 1)


def _check_advantages(step: "Step", algorithm: dict[str, Any]) -> None:
    """The advantages as trained, from the rewards."""
    whole = algorithm["advantage"] == "reinforce"
    batches = [step.groups] if whole else [(group,) for group in step.groups]
    for batch in batches:
        rewards = [s.reward for group in batch for s in group.samples]
        wanted, unsure = advantages(rewards, algorithm["advantage"], algorithm["stdNorm"], step.eps)
        samples = ((group.index, i, s) for group in batch for i, s in enumerate(group.samples))
        for (index, i, sample), value in zip(samples, wanted, strict=True):
            if not abs(sample.advantage - value) <= unsure:
                raise Contradiction(
                    f"the advantage of group {index}, sample {i} is {sample.advantage:.6g}, the rewards give "
                    f"{value:.6g} by {algorithm['advantage']}"
                )


def check_identity(state: dict[str, Any], run: dict[str, Any]) -> str:
    """What a checkpoint's state.json says otherwise than run.json of whose it is; "" for nothing.

    dataDigest covers the data file, and which of its rows the run's tokenizer and lengths left: it cannot be made
    again from the records, only compared.
    """
    identity = state["identity"]
    pairs = [
        ("uid", identity["uid"], run["uid"]),
        ("base_digest", identity["base_digest"], run["baseDigest"]),
        ("data_digest", identity["data_digest"], run["dataDigest"]),
        ("target_step", state["target_step"], run["targetStep"]),
    ]
    texts = (f"{name} of state.json is {found}, the run's is {told}" for name, found, told in pairs if found != told)
    return next(texts, "")
