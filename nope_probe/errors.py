"""The errors that commands print in one line."""


class UserError(ValueError):
    """Raised for a request that cannot be carried out; its text is one line that says why.

    Commands print it on stderr and exit with code 2, without a traceback.
    """


class TooFewLayersError(UserError):
    """Raised where a model has fewer layers than were requested.

    Attributes:
        source: the model.
        depth: how many layers it has.
    """

    def __init__(self, source: str, *, depth: int, requested: int) -> None:
        super().__init__(
            f"{source} has {depth} layers, {requested} were asked for; try --layers all"
        )
        self.source, self.depth = source, depth
