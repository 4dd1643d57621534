"""What a command tells a user who can do something about it. The command line prints it in one line."""


class CliError(Exception):
    """A failure as `FIELD: VALUE: FIX`.

    Args:
        field: what is wrong: an argument, a field of an object, a part of the system.
        value: its value.
        fix: what is wrong with it and what to do.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, value, fix)
        self.field, self.value, self.fix = field, value, fix

    def __str__(self) -> str:
        return " ".join(f"{self.field}: {self.value}: {self.fix}".split())


class Forbidden(CliError):
    """The API server does not let this user."""


class Unauthorized(CliError):
    """The API server does not take this user's credentials."""


class UnknownRun(CliError):
    """There is no AdapterRun of that name, or there is none any more."""


class Unavailable(CliError):
    """The API server or a runtime does not answer now; who waits may try again."""
