"""Pieces of sentences: lists, layers and percentages, as headings have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def capitalised(text: str) -> str:
    """Return a text with its first letter large, and all others as they are.

    Example:
        >>> capitalised("the causal mask"), capitalised("RoPE")
        ('The causal mask', 'RoPE')
    """
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    """Return parts as a list in a sentence.

    Example:
        >>> listed(["mask"]), listed(["mask", "RoPE", "W_Q"])
        ('mask', 'mask, RoPE and W_Q')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def percents(share: float) -> str:
    """Return a share in whole percents, and below one in tenths.

    Example:
        >>> percents(0.984), percents(0.004), percents(0.0), percents(-0.12)
        ('98%', '0.4%', '0%', '-12%')
    """
    value = 100 * float(share)
    return f"{value:.1f}%" if 0.05 <= abs(value) < 0.95 else f"{value:z.0f}%"


def numbered_layers(numbers: Iterable[int]) -> str:
    """Return layers by number, runs of three and more as such.

    Example:
        >>> numbered_layers([1, 2, 3, 7])
        'L1 to L3, L7'
    """
    runs: list[list[int]] = []
    for number in sorted({int(each) for each in numbers}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"L{run[0]} to L{run[-1]}" if len(run) > 2 else ", ".join(f"L{each}" for each in run)
        for run in runs
    )
