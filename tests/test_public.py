"""What is public: its names, and a line for what its functions cannot take."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from inspect import getdoc, isclass, isfunction, signature, unwrap
from types import ModuleType
from typing import Any, get_args, get_type_hints

import make_options
import numpy as np
import pytest
import torch
from import_rule import STUDIES
from test_choices import Names

import nope_probe
from nope_probe import (
    Ablation,
    LoadedModel,
    UserError,
    ablated,
    attribute,
    capture_attention,
    capture_scores,
    capture_stages,
    difference,
    figures,
    measure,
    measure_heads,
    row_centred,
    split_attention,
)
from nope_probe.figures import score_maps, term_maps

TOKENS = torch.randint(5, 90, (7, 13), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def maps(rope_tiny: LoadedModel) -> Any:
    return capture_scores(rope_tiny, TOKENS, per_head=True)


def classes_in(hint: Any) -> Iterator[type]:
    if isclass(hint) and hint.__module__.startswith("nope_probe."):
        yield hint
    for part in get_args(hint):
        yield from classes_in(part)


@pytest.mark.parametrize("package", [nope_probe, figures])
def test_the_classes_that_public_functions_return_are_public_too(package: ModuleType) -> None:
    returned = set()
    for name in package.__all__:
        function = getattr(package, name)
        if isfunction(function):
            hints = get_type_hints(unwrap(function), localns=Names(unwrap(function).__globals__))
            returned |= {*classes_in(hints["return"])}
    assert len(returned) >= {"nope_probe": 12, "nope_probe.figures": 0}[package.__name__]
    for found in returned:
        assert getattr(package, found.__name__) is found


@pytest.mark.parametrize("package", [nope_probe, figures])
def test_a_package_shows_its_public_names_in_order_and_nothing_that_it_imports(
    package: ModuleType,
) -> None:
    shown = {name for name in dir(package) if not name.startswith("__")}
    assert sorted(shown) == [*package.__all__]
    assert all(getattr(package, name).__doc__ for name in shown)
    with pytest.raises(AttributeError, match=r"has no 'attribut'; it has \w+, \w+"):
        _ = package.attribut


FUNCTIONS = {import_module(f"nope_probe.{name}").Settings.function: name for name in STUDIES}
RUN_FUNCTIONS = {function: name for function, name in FUNCTIONS.items() if function}


@pytest.mark.parametrize("name", RUN_FUNCTIONS)
def test_a_run_function_shows_the_flags_of_its_command_with_their_defaults_and_help(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = import_module(f"nope_probe.{RUN_FUNCTIONS[name]}")
    function = getattr(nope_probe, name)
    options = {option.name: option.default for option in signature(function).parameters.values()}
    hidden = {"layers"} if name == "run_circuit" else set()  # it follows one block
    of_command = {field.name: field.default for field in fields(command.Settings)}
    assert {*of_command} - {*options} == hidden
    for option, default in of_command.items():
        if option not in ("model", *hidden):
            assert options[option] == default
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        command.main()
    helped = " ".join(re.sub("[│╭╮╰╯─]", " ", shown.getvalue()).replace("`", "").split())
    documented = (getdoc(function) or "").partition("options: ")[2].partition("Raises:")[0]
    sentences = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", documented, re.M))
    assert {*sentences} == {*options} - {"model", "inputs", "out"}
    for sentence in sentences.values():
        assert " ".join(sentence.replace("`", "").split()) in helped


def test_type_checkers_are_told_what_the_settings_say() -> None:
    stub = make_options.OUT.read_text(encoding="utf-8")
    assert stub == make_options.text(), "run python docs/make_options.py"


def scaled(weight: torch.Tensor, place: Any, factor: float = 2.0) -> torch.Tensor:
    return factor * weight


@pytest.mark.wrong_types
def test_numbers_of_any_kind_and_functions_of_two_arguments_are_taken() -> None:
    for layers in ([0, 1], range(2), np.arange(2), {0: None}.keys()):
        assert Ablation(remove="w_q", layers=layers).layers is layers  # type: ignore[arg-type]
    for heads in ({0: [1]}, {np.int64(0): np.arange(2)}):
        assert Ablation(remove="w_q", heads=heads).heads is heads  # type: ignore[arg-type]
    for replacement in (scaled, lambda *both: both[0], torch.ones(3), torch.nn.Bilinear(1, 1, 1)):
        assert Ablation(remove="w_q", replacement=replacement).replacement is replacement


LAYERS = r"expected the numbers of layers, such as \[0, 1\], got "
FOLDS = r"expected maps of `capture_scores`, or fold means \[fold, layer, row, key_pos\], got "
MEANS = (
    r"expected maps of `capture_scores` or `capture_attention`, or mean scores "
    r"\[layer, row, key_pos\], got "
)
PLACE = "a replacement is called with a weight and its place: write it as `lambda weight, place: "
ONE = {0: [1]}
HEADS = r"expected heads by layer, such as {0: \[1, 3\]}, got "


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 1}, LAYERS + "1"),
        ({"layers": "01"}, LAYERS + "'01'"),
        ({"layers": [0.0]}, LAYERS),
        ({"layers": [True]}, LAYERS + r"\[True\]"),
        ({"heads": [(0, 1)]}, HEADS + r"\[\(0, 1\)\]"),
        ({"heads": {"0": [1]}}, LAYERS + r"\['0'\]"),
        ({"heads": {0: 1}}, r"heads of L0: expected their numbers, such as \[1, 3\], got 1"),
        ({"heads": {0: ["1"]}}, "heads of L0: expected their numbers"),
        ({"replacement": lambda weight: weight}, PLACE),
        ({"replacement": lambda weight, place, more: weight}, PLACE),
        ({"replacement": 5}, "a replacement is identity, random, .*zero, a tensor, or a .* int"),
        ({"seed": "3"}, "seed '3': expected a whole number"),
        ({"remove": ["mask"], "prefix": "3"}, "prefix '3': expected a whole number"),
        ({"remove": 5}, "expected the names of components to remove, .*got 5"),
        ({"remove": ["mask", 5]}, "expected the names of components to remove, .*got 5"),
        ({"remove": ["mask", "w_qk"]}, "unknown component 'w_qk'; there are mask, rope"),
        (
            {"gain": "norm"},
            ".*no effect on the replacement 'mean': take replacement='identity', or",
        ),
        ({"gain": "loud"}, "gain 'loud' should be 'output', 'norm' or 'identity'"),
        ({"remove": ["qk", "w_q"]}, "qk and w_q share w_q"),
        ({"remove": ["rope_low", "rope"]}, "rope_low and rope share rotary pairs"),
        ({"heads": {True: [0]}}, LAYERS),
        ({"replacement": "median"}, ".*'median' should be 'identity', 'random', .*'zero'"),
        ({"remove": ["w_q", "mlp"], "heads": ONE}, "mlp has no heads; mask, rope, .*content have"),
        ({"remove": ["norms"], "heads": ONE}, "norms has no heads; mask"),
        ({"heads": ONE, "layers": [0]}, "expected layers or heads, not"),
        ({"remove": ["mask"], "prefix": 0}, "expected a prefix of 1 position or more, got 0"),
        ({"remove": ["rope"], "prefix": 3}, ".*for removing the mask; this removes rope$"),
        ({"remove": ["position[L1H0]"], "layers": [1]}, ".*takes no layers"),
        ({"remove": ["position[L1H0]"], "heads": ONE}, ".*has no heads"),
    ],
)
def test_an_ablation_that_cannot_be_is_refused_in_a_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}") as error:
        Ablation(**{"remove": "w_q", **options})
    assert "\n" not in str(error.value)


CALLS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "capture_scores": (lambda m, t, maps: capture_scores(m, t, layers=1), LAYERS + "1"),  # type: ignore[arg-type]
    "capture_attention": (lambda m, t, maps: capture_attention(m, t, layers="1"), LAYERS + "'1'"),  # type: ignore[arg-type]
    "ablated": (
        lambda m, t, maps: ablated(m, 5).__enter__(),
        r"expected an Ablation, or the components to remove, such as \['mask', 'w_q'\], got int",
    ),
    "measure mean": (lambda m, t, maps: measure(maps.mean), FOLDS + r"Tensor \[2, 13, 13\]"),
    "measure heads": (lambda m, t, maps: measure(maps.per_head), FOLDS + "Tensor"),
    "measure array": (lambda m, t, maps: measure(maps.folds.numpy()), FOLDS + "ndarray"),
    "measure_heads": (lambda m, t, maps: measure_heads(maps.mean), FOLDS + "Tensor"),
    "split_attention": (
        lambda m, t, maps: split_attention(maps),
        "expected maps of `capture_attention`, got ScoreMaps",
    ),
    "attribute": (
        lambda m, t, maps: attribute([maps]),  # type: ignore[arg-type]
        "expected maps by the removed components, .* got list",
    ),
    "attribute means": (lambda m, t, maps: attribute({(): maps.mean}), FOLDS),
    "row_centred": (lambda m, t, maps: row_centred(maps), "expected a tensor .* got ScoreMaps"),
    "difference": (lambda m, t, maps: difference(maps, maps), "expected runs, .* got ScoreMaps"),
    "score_maps": (lambda m, t, maps: score_maps(maps.per_head), MEANS + "Tensor"),
    "score_maps of one": (lambda m, t, maps: score_maps(maps.mean[0]), MEANS + "Tensor"),
    "score_maps of stages": (
        lambda m, t, maps: score_maps(capture_stages(m, t)),
        MEANS + "StageMaps",
    ),
    "score_maps of unlike maps": (
        lambda m, t, maps: score_maps({"one": maps, "other": capture_scores(m, t[:, 2:])}),
        "the maps differ in their layers or positions: {'one': ",
    ),
    "score_maps of None": (lambda m, t, maps: score_maps(None), MEANS + "None"),
    "term_maps": (
        lambda m, t, maps: term_maps({"mask": maps.per_head}, title="t"),
        MEANS + "Tensor",
    ),
    "term_maps without names": (
        lambda m, t, maps: term_maps(maps, title="t"),
        "expected maps by name, such as {'mask': maps}, got ScoreMaps",
    ),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_another_kind_is_refused_in_a_line(
    call: str, rope_tiny: LoadedModel, maps: Any
) -> None:
    function, message = CALLS[call]
    with pytest.raises(UserError, match=f"^{message}") as error:
        function(rope_tiny.model, TOKENS, maps)
    assert "\n" not in str(error.value)
