"""Every closed choice of a public name is checked at the door, in Python as on the command line."""

import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from inspect import isfunction, signature, unwrap
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from command_reference import commands
from support.command_line import leaves_of

import nope_probe
from nope_probe import UserError, figures, run_behaviour, sequences

MADE = ("Ablation", "ParameterFreeSpec", "RowMaps")  # by users; functions return the other classes
MISSING = object()  # for arguments that have no default: they are not looked at before the choices


class Names(dict[str, Any]):
    """The names of a module; one that it imports for type checkers alone stands for any object."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)


def takes_several(hint: Any) -> bool:
    """Return whether a type is, or has among others, that of sequences of choices."""
    is_sequence = get_origin(hint) in (tuple, Sequence)
    return is_sequence or any(takes_several(part) for part in get_args(hint))


def choices_of(made: Any) -> Iterator[tuple[str, list[Any], bool]]:
    """Yield each parameter that has choices, the choices, and whether it takes several."""
    names = None if is_dataclass(made) else Names(unwrap(made).__globals__)
    hints = get_type_hints(unwrap(made), localns=names)
    for name, parameter in signature(made).parameters.items():
        hint = hints.get(name, parameter.annotation)  # of a flag, its type itself
        if words := [leaf for leaf in leaves_of(hint) if isinstance(leaf, str)]:
            yield name, words, takes_several(hint)


def public() -> Iterator[tuple[str, Any]]:
    for module in (nope_probe, figures):
        for name in module.__all__:
            if isfunction(getattr(module, name)) or name in MADE:
                yield name, getattr(module, name)
    for settings in (command.Settings for command in commands()):
        yield settings.__module__.removeprefix("nope_probe.studies."), settings


PARAMETERS = [
    pytest.param(made, name, words, several, id=f"{of}-{name}")
    for of, made in public()
    if isfunction(made) or is_dataclass(made)
    for name, words, several in choices_of(made)
]


def refusal(made: Callable[..., Any], **choice: Any) -> str:
    """Return why a call ends that was given nothing to work on but a choice."""
    first = {name: words[0] for name, words, _ in choices_of(made)}
    required = {
        name: first.get(name, MISSING)
        for name, parameter in signature(made).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    try:
        made(**required | choice)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.wrong_types
@pytest.mark.parametrize(("made", "name", "words", "several"), PARAMETERS)
def test_a_right_choice_passes_the_door_and_a_wrong_one_is_refused_by_name(
    made: Any, name: str, words: list[Any], several: bool
) -> None:
    unknown = rf"UserError: (--)?{name.replace('_', '[-_]')} .* should be "
    for word in words:
        given = (word,) if several else word
        assert not re.match(unknown, refusal(made, **{name: given}))
    for wrong in (("Auto",), ("auto", "x")) if several else ("x", "Auto", ""):
        refused = refusal(made, **{name: wrong})
        assert re.match(unknown, refused)
        assert f"should be {words[0]!r}" in refused


def test_choices_are_found_in_the_types_of_all_public_names() -> None:
    ids = {str(parameter.id) for parameter in PARAMETERS}
    assert {"sequences-windows", "Ablation-gain", "circuit-skip_keys", "behaviour-measures"} <= ids
    assert "capture_stages-stages" in ids
    assert len(PARAMETERS) >= 40


@pytest.mark.wrong_types
def test_a_choice_is_refused_by_position_too_and_numbers_beside_words_are_not() -> None:
    maps = torch.zeros(4, 1, 11, 11)
    with pytest.raises(UserError, match=r"skip_keys 'one' should be a valid integer or .* 'auto'"):
        nope_probe.measure(maps, "one")  # type: ignore[arg-type]
    assert len(nope_probe.measure(maps, 1)) == 1
    with pytest.raises(UserError, match="windows 'Random' should be 'random' or 'start'"):
        sequences(tokenizer=None, windows="Random")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--measures 'losses' should be 'loss', 'in-context'"):
        run_behaviour("nope-tiny", measures=["loss", "losses"])


def test_a_removed_weight_becomes_its_mean_in_every_command_and_in_python() -> None:
    defaults = [
        signature(made).parameters["replacement"].default
        for _, made in public()
        if "replacement" in signature(made).parameters
    ]
    assert len(defaults) > 4
    assert {*defaults} == {"mean", ("mean",)}
