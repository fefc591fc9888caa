"""How much each part of a model minds being rounded, and the bits that a size in bytes is best spent on.

For small errors the divergence that rounding causes is a sum over the parts, so that each is measured alone, at few
bits, and what any choice costs is the sum of its parts. Which choice under a size costs least is a knapsack
(`allocation.least_cost`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotaryquant.allocation import least_cost
from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import Part
from rotaryquant.weights.recipes import AUTO, Place, Recipe, by_role
from rotaryquant.weights.shards import write_whole

#: File of what was measured, in the folder that is written unless another is named.
MEASURED = "quantization-sensitivity.jsonl"

#: Bits at which a part is rounded to be measured; more cost too little to be told from nothing.
PROBED = (2, 3, 4)


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one part of one layer costs.

    nats: mean KL divergence at each of PROBED. errors: squared errors of the weights over their own squares, at each of
    BITS.
    """

    part: Part
    layer: int | None
    nats: tuple[float, ...]
    errors: tuple[float, ...]

    def cost(self, bits: int) -> float:
        """Nats at `bits`; where they were not probed, in proportion to the squared error."""
        if bits in PROBED:
            return max(self.nats[PROBED.index(bits)], 0.0)
        last = self.errors[BITS.index(PROBED[-1])]
        return self.cost(PROBED[-1]) * self.errors[BITS.index(bits)] / last if last > 0 else 0.0


def choose(measured: Iterable[Sensitivity], sizes: Mapping[Place, Mapping[int, int]], other: int, size: int) -> Recipe:
    """The recipe whose files have at most `size` bytes and that costs least.

    sizes: bytes of each part and layer at each of BITS. other: bytes of everything else. Raises ConfigError where the
    size is below that of the fewest bits.
    """
    by_place = {(one.part, one.layer): one for one in measured}
    if missing := [place for place in sizes if place not in by_place]:
        raise ConfigError(f"{missing[0][0]} of layer {missing[0][1]} was not measured; measure again")
    refuse_too_small(sizes, other, size)
    places = list(sizes)
    picked = least_cost(
        [[by_place[place].cost(bits) for bits in BITS] for place in places],
        [[sizes[place][bits] for bits in BITS] for place in places],
        size - other,
    )
    if picked is None:  # sizes are rounded up to whole steps, which only the last few bytes are too few for
        raise ConfigError(f"size={size:,} bytes is so near to the least that no choice fits; give a little more")
    chosen = {place: BITS[option] for place, option in zip(places, picked, strict=True)}
    return Recipe(AUTO, by_role(BITS[0], BITS[0], BITS[0]), places=chosen)


def refuse_too_small(sizes: Mapping[Place, Mapping[int, int]], other: int, size: int) -> None:
    """Raise ConfigError where a size is below that of the fewest bits everywhere: known before anything is measured."""
    least = other + sum(min(of.values()) for of in sizes.values())
    if size < least:
        raise ConfigError(
            f"size={size:,} bytes is below {least:,}, which every part at {BITS[0]} bits needs; give more"
        )


class MeasuredFile:
    """A line for what was measured of which checkpoint, then one a part and layer, added as they come.

    path: of the file, made with the first line. of: what the numbers are of. Raises ModelFileError where the file holds
    those of something else.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path, self._of = path, dict(of)
        self.found: dict[Place, Sensitivity] = {}
        lines = path.read_text().splitlines() if path.is_file() else []
        kept = [json.dumps(self._of)]
        for number, line in enumerate(lines):
            try:
                said = json.loads(line)
                if number == 0:
                    self._check(said)
                    continue
                one = Sensitivity(Part.parse(said["part"]), said["layer"], tuple(said["nats"]), tuple(said["errors"]))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) - 1:  # cut off by a stop, and measured again
                    break
                raise ModelFileError(f"{path}: line {number + 1} is damaged; delete the file") from error
            self.found[one.part, one.layer] = one
            kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(line + "\n" for line in kept))

    def _check(self, said: Any) -> None:
        if said == self._of:
            return
        field = next((key for key in self._of if not isinstance(said, dict) or said.get(key) != self._of[key]), "more")
        raise ModelFileError(
            f"{self.path}: was measured with another {field}; delete it, or name another file with --sensitivity"
        )

    def add(self, one: Sensitivity) -> None:
        """Keep one more."""
        self.found[one.part, one.layer] = one
        said = {"part": str(one.part), "layer": one.layer, "nats": list(one.nats), "errors": list(one.errors)}
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\n")
