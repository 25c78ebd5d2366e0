"""Commands on the site: lines do not break at the hyphens of `--seq-len` and `llama-3.1-8b`."""

from collections.abc import Iterator

from pygments.lexers.shell import BashLexer
from pygments.token import Name, Text, _TokenType
from sphinx.application import Sphinx


class CommandLexer(BashLexer):
    """Bash, whose words with hyphens have a class, which site.css keeps whole."""

    def get_tokens_unprocessed(
        self, text: str, stack: tuple[str, ...] = ("root",)
    ) -> Iterator[tuple[int, _TokenType, str]]:
        for index, kind, word in super().get_tokens_unprocessed(text, stack):
            yield index, Name if kind is Text and "-" in word else kind, word


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_lexer("bash", CommandLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
