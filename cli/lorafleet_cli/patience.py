"""How long a command that follows something bears a system that is away or refuses. Called by watch and logs."""

import time

from lorafleet_cli.errors import CliError, Forbidden, Unauthorized, Unavailable

REFUSED_SECONDS = 15.0
"""An API server that starts again refuses everybody for a second or two; a refusal that lasts longer is meant."""


class Patience:
    """Begins with the first success: an error before that is told at once."""

    def __init__(self) -> None:
        self._refused_since: float | None = None

    def bears(self, error: CliError) -> bool:
        """Whether to go on after this error."""
        if isinstance(error, Unavailable):
            self._refused_since = None
            return True
        if not isinstance(error, Forbidden | Unauthorized):
            return False
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since < REFUSED_SECONDS

    def heard(self) -> None:
        """All is well again."""
        self._refused_since = None
