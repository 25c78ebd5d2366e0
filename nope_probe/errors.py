"""The one exception that a user's mistake raises."""


class UserError(ValueError):
    """Say in one line what the user asked for that cannot be done, and what can.

    Commands print it on stderr and exit with code 2; it is never a traceback there.
    """
