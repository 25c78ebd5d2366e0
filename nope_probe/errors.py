"""The errors that commands print in one line, and how a line is printed."""


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


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with every character escaped that a terminal would not show.

    Args:
        text: the text, such as a file's name.
        keep: characters to leave as they are.

    Example:
        >>> printable("a\x1b[31mb\nc"), printable("a\nb", keep="\n")
        ('a\\x1b[31mb\\nc', 'a\nb')
    """
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )
