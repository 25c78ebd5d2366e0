"""The errors for a user's mistakes."""


class UserError(ValueError):
    """A request that cannot be met; the message is one line that says why, and what can be done.

    Commands print it on stderr, without a traceback, and exit with code 2.
    """


class TooFewLayersError(UserError):
    """A request for more layers than a model has.

    Attributes:
        source: the model.
        depth: how many layers it has.
    """

    def __init__(self, source: str, *, depth: int, asked: int) -> None:
        super().__init__(f"{source} has {depth} layers, {asked} were asked for; try --layers all")
        self.source, self.depth = source, depth
