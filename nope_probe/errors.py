"""What a user's mistake raises."""


class UserError(ValueError):
    """Say in one line what the user asked for that cannot be done, and what can.

    Commands print it on stderr and exit with code 2; it is never a traceback there.
    """


class TooFewLayersError(UserError):
    """Say that a model has fewer layers than were asked for.

    Attributes:
        source: the model.
        depth: how many layers it has.
    """

    def __init__(self, source: str, *, depth: int, asked: int) -> None:
        super().__init__(f"{source} has {depth} layers, {asked} were asked for; try --layers all")
        self.source, self.depth = source, depth
