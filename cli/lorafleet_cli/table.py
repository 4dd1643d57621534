"""The table of runs that status and watch show."""

from collections.abc import Sequence

from rich.table import Table

WIDE = 110
"""Terminals of at least so many columns have room for whole bars."""

_FIGURES = ("STEP", "REWARD", "ETA")


def runs_table(headings: Sequence[str]) -> Table:
    """An empty table that never cuts a figure: where there is little room, names are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            no_wrap=heading not in ("NAMESPACE", "NAME"),
            overflow="fold",
            justify="right" if heading in _FIGURES else "left",
        )
    return table
