"""Errors of the runtime.

RuntimeFault
├── RunError            belongs to one run: fail that run with (reason, message), go on with the others
│   └── Damaged         its stored files were read and are not what was written: asking again changes nothing
├── ConfigError         the runtime's own configuration is wrong: do not start
└── Retryable           try again: an engine or worker is away
"""

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.types import RunFault


class RuntimeFault(Exception):
    """Root of the runtime's errors."""


class RunError(RuntimeFault):
    """A failure of one run; the pool goes on.

    Args:
        reason: a constant of lorafleet_api.v1alpha1.reasons (a member of FAILURE_REASONS).
        message: names the field, the value and the fix.
        detail: more for the run's own log, as a traceback.
    """

    def __init__(self, reason: str, message: str, detail: str = "") -> None:
        message = sendable(message)
        super().__init__(reason, message, detail)  # all in args: the error must survive pickling between actors
        self.reason = reason
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    def fault(self, uid: str) -> RunFault:
        """This error as a value, for the run `uid`."""
        return RunFault(uid, self.reason, self.message, self.detail)


class Damaged(RunError):
    """Stored files of a run were read, and are missing, cut or changed; reason StorageError. Nobody asks again."""


class ConfigError(RuntimeFault):
    """The runtime's configuration names the field, the value and the fix."""


class Retryable(RuntimeFault):
    """The other side is away or restarting; the caller tries again."""


def sendable(text: str) -> str:
    """The text with "?" for halves of surrogate pairs: one of them would break the listing of all runs.

    Data files (as JSON escapes) and exceptions of rewards can hold them; UTF-8 has no word for them.
    """
    return text.encode(errors="replace").decode()


def unforeseen(uid: str, error: Exception) -> RunFault:
    """The fault of a run whose work raised what nobody foresaw; the caller has logged the traceback."""
    text = sendable(f"{type(error).__name__}: {error}; the runtime's log has more")
    return RunFault(uid, reasons.INTERNAL_ERROR, text)
