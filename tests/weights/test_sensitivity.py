"""What was measured of a model's parts: the recipe that comes of it, and the file it is kept in."""

import json
from pathlib import Path

import pytest

from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import Part, Role, Side
from rotaryquant.weights.recipes import Place
from rotaryquant.weights.sensitivity import MeasuredFile, Sensitivity, choose

EXPERTS, VALUES = Part(Role.ROUTED_EXPERT, Side.IN), Part(Role.ATTENTION, Side.VALUE)
ERRORS = (0.09, 0.022, 0.0063, 0.00004)


def sensitivity(part: Part, layer: int | None, nats: float) -> Sensitivity:
    return Sensitivity(part, layer, tuple(nats * error for error in ERRORS[:3]), ERRORS)


def sizes(**of: int) -> dict[Place, dict[int, int]]:
    weights = {(EXPERTS, 0): of["experts"], (VALUES, 0): of["values"]}
    return {place: {bits: count * bits // 8 for bits in BITS} for place, count in weights.items()}


def test_bits_go_where_they_save_most_for_their_bytes() -> None:
    measured = [sensitivity(EXPERTS, 0, 1.0), sensitivity(VALUES, 0, 1.0)]
    of = sizes(experts=8000, values=800)
    tight = choose(measured, of, 100, 100 + 2000 + 450)
    assert tight.places == {(EXPERTS, 0): 2, (VALUES, 0): 4}
    loose = choose(measured, of, 100, 100 + 3000 + 850)
    assert loose.places == {(EXPERTS, 0): 3, (VALUES, 0): 8}
    assert loose.name == "role-auto"


def test_eight_bits_cost_in_proportion_to_their_error() -> None:
    one = sensitivity(EXPERTS, 0, 3.0)
    assert [one.cost(bits) for bits in BITS] == pytest.approx([3.0 * error for error in ERRORS])
    below_noise = Sensitivity(EXPERTS, 0, (0.1, 0.01, -1e-9), ERRORS)
    assert below_noise.cost(4) == below_noise.cost(8) == 0.0


def test_a_size_that_nothing_fits_and_a_part_that_was_not_measured() -> None:
    measured = [sensitivity(EXPERTS, 0, 1.0), sensitivity(VALUES, 0, 1.0)]
    of = sizes(experts=8000, values=800)
    for size in (2299, 50):
        with pytest.raises(ConfigError, match=rf"size={size:,} bytes is below 2,300, which every part at 2 bits needs"):
            choose(measured, of, 100, size)
    assert set(choose(measured, of, 100, 2300).places.values()) == {2}
    with pytest.raises(ConfigError, match="attention value of layer 0 was not measured"):
        choose(measured[:1], of, 100, 5000)


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    path, of = tmp_path / "new" / "measured.jsonl", {"model": "abc", "tokens": 7}
    first = MeasuredFile(path, of)
    kept = [sensitivity(EXPERTS, 3, 1 / 3), sensitivity(Part(Role.EMBEDDING, Side.IN), None, 0.1)]
    for one in kept:
        first.add(one)
    assert list(MeasuredFile(path, of).found.values()) == kept
    with path.open("a") as file:
        file.write('{"part": "attention", "la')  # a stop in the middle of a line
    again = MeasuredFile(path, of)
    assert list(again.found.values()) == kept
    again.add(sensitivity(VALUES, 0, 2.0))
    assert len(MeasuredFile(path, of).found) == 3


def test_a_file_of_something_else_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    MeasuredFile(path, {"model": "abc", "tokens": 7}).add(sensitivity(EXPERTS, 0, 1.0))
    with pytest.raises(ModelFileError, match="was measured with another tokens; delete it, or name another file"):
        MeasuredFile(path, {"model": "abc", "tokens": 8})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({"part": "engine", "layer": 0}), lines[1]]) + "\n")
    with pytest.raises(ModelFileError, match="line 2 is damaged; delete the file"):
        MeasuredFile(path, {"model": "abc", "tokens": 7})
