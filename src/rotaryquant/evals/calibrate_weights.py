"""What rounding each part of a model costs, measured: one part at a time at few bits, the rest as it was.

The model reads a stretch of text with the part's weights replaced by what their codes stand for, and its predictions
are held against those without (`weights.sensitivity` makes a recipe of it).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaryquant.formats.weight import BITS
from rotaryquant.measuring import Progress
from rotaryquant.models.roles import layer_number, parts_of
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import ROUNDED, Place
from rotaryquant.weights.sensitivity import PROBED, MeasuredFile, Sensitivity
from rotaryquant.weights.stacks import round_tensor

#: Gives the second moment of a matrix' inputs by its name in the model (for a stack: of each), or None.
Moments = Callable[[str], Tensor | None]


def measure_sensitivity(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    base: PackedConfig,
    moments: Moments,
    measured: MeasuredFile,
    progress: Progress,
) -> list[Sensitivity]:
    """Each part of each layer, in the order of layers; what `measured` has already is not measured again.

    model: fp32, left as it was. windows: ids [tokens] of what is read. base: grid, group and seed of the codes.
    """
    places = _places(model)
    reference: list[Tensor] = []
    for number, (place, names) in enumerate(places.items()):
        if place in measured.found:
            continue
        part, layer = place
        progress(f"measuring {part}{'' if layer is None else f' of layer {layer}'}", number / len(places))
        if not reference:
            reference = [_log_probabilities(model, ids) for ids in windows]
        measured.add(_measured(model, place, names, windows, reference, base, moments))
    return [measured.found[place] for place in places]


def _places(model: PreTrainedModel) -> dict[Place, list[str]]:
    """Names of the model's matrices that a recipe can round, by part and layer, layers ascending."""
    named = dict(model.named_parameters())
    places: dict[Place, list[str]] = {}
    for name, part in parts_of(named).items():
        if part.role in ROUNDED and named[name].dim() in (2, 3):
            places.setdefault((part, layer_number(name)), []).append(name)
    return dict(sorted(places.items(), key=lambda item: (item[0][1] is None, item[0][1] or 0, item[0][0])))


def _measured(
    model: PreTrainedModel,
    place: Place,
    names: Sequence[str],
    windows: Sequence[Tensor],
    reference: Sequence[Tensor],
    base: PackedConfig,
    moments: Moments,
) -> Sensitivity:
    named = dict(model.named_parameters())
    whole = {name: named[name].detach().clone() for name in names}
    squares = sum(float(weight.double().square().sum()) for weight in whole.values())
    nats, errors = [], []
    hessians = {name: moments(name) for name in names}
    for bits in BITS:
        error = 0.0
        for name, weight in whole.items():
            form = base.form(weight.shape[-1], bits)
            coded = weight if form is None else round_tensor(weight, form, hessians[name], scaled=base.factors).values
            error += float((coded - weight).double().square().sum())
            named[name].data.copy_(coded)
        errors.append(error / squares if squares > 0 else 0.0)
        if bits in PROBED:
            nats.append(_divergence(model, windows, reference))
    for name, weight in whole.items():
        named[name].data.copy_(weight)
    return Sensitivity(*place, tuple(nats), tuple(errors))


def _divergence(model: PreTrainedModel, windows: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Mean KL divergence from the reference, nats a position."""
    total, positions = 0.0, 0
    for ids, exact in zip(windows, reference, strict=True):
        found = _log_probabilities(model, ids)
        total += float((exact.exp() * (exact - found)).sum(-1).double().sum())
        positions += len(ids)
    return total / positions


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(ids[None], use_cache=False).logits[0].float(), -1)
