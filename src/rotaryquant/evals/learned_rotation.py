"""SO(4) blocks that are learned on a calibration text, in place of random ones, in the packed cache itself.

The rotation stays B·H·S·x and its cost and bytes stay what they are; of each block of four coordinates the two unit
quaternions move down the error that codes are expected to make: of logits for keys (by the queries' second moment), of
values by the squared attention that each got. Codes are held while a step is taken.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.facts import CONTEXT
from rotaryquant.evals.simulated import Facts
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.formats.rotation import quaternions, so4_matrix
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.enable import EnabledModel
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.protect import dominating_mean
from rotaryquant.ops.quantize import dequantize, quantize
from rotaryquant.ops.rotate import Rotation, build_rotation, rotate
from rotaryquant.ops.streams import Codec

_STEPS, _ROWS, _RATE, _JUDGED = 300, 512, 0.02, 2048
#: Quaternions 1, i, j, k.
_UNITS = np.eye(4)


@dataclass(frozen=True)
class Rows:
    """Rows of one stream as the cache codes them, and what an error in them counts.

    rows: fp32 [num_kv_heads, tokens, width]. moment: [num_kv_heads, width, width], or None for the identity. weights:
    [num_kv_heads, tokens], or None for alike.
    """

    rows: Tensor
    moment: Tensor | None
    weights: Tensor | None

    def part(self, picked: Tensor) -> "Rows":
        """Those of some tokens."""
        return Rows(self.rows[:, picked], self.moment, None if self.weights is None else self.weights[:, picked])

    def felt(self, error: Tensor) -> Tensor:
        """What errors of the shape of the rows cost, summed."""
        across = error if self.moment is None else error @ self.moment
        return self.summed((across * error).sum(-1))

    def summed(self, each: Tensor) -> Tensor:
        """Costs of rows [num_kv_heads, tokens] by what they count."""
        return (each if self.weights is None else each * self.weights).sum()


def streams_of(facts: Facts, config: KVCacheConfig, slow: Tensor | None) -> tuple[Rows, Rows]:
    """Keys and values of a layer behind the sinks; keys without the mean that the cache would take off each window."""
    heads, _, width = facts.keys.shape
    windows = facts.keys.view(heads, -1, CONTEXT, width)[:, :, config.sinks :]
    if config.mean:
        slow = slow.to(facts.keys.device) if slow is not None else None
        first = windows[:, :, : BLOCK - config.sinks].unbind(1)
        means = torch.stack([dominating_mean(block, config.tau, slow)[0] for block in first], 1)
        windows = windows - means.bfloat16().float()[:, :, None]
    values = facts.values.view(heads, -1, CONTEXT, width)[:, :, config.sinks :].flatten(1, 2)
    assert facts.value_weights is not None
    weights = facts.value_weights.view(heads, -1, CONTEXT)[..., config.sinks :].flatten(1)
    return Rows(windows.flatten(1, 2), facts.query_moment, None), Rows(values, None, weights)


def rotations_of(config: KVCacheConfig, layer: int, facts: Facts) -> tuple[Rotation, Rotation]:
    """What the cache turns keys and values of a layer by."""
    formats = config.stream_formats(facts.keys.shape[-1], facts.values.shape[-1])
    heads, device = facts.keys.shape[0], facts.keys.device
    keys, values = (build_rotation(stream, layer, heads, device=device) for stream in formats)
    return keys, values


def code_errors(
    config: KVCacheConfig,
    facts: Mapping[int, Facts],
    slow: Mapping[int, Tensor],
    rotations: Mapping[int, tuple[Rotation, Rotation]] | None = None,
) -> dict[str, float]:
    """Expected squared error of logits (`key_error`) and of values (`value_error`) by the codes of a configuration on
    windows that are held back, as shares of the logits' and the values' own squares, averaged over layers.

    rotations: in place of the configuration's.
    """
    found = {"key_error": 0.0, "value_error": 0.0}
    for layer, one in facts.items():
        few, own = split(one)[1], config.of_layer(layer)
        turns = rotations_of(own, layer, few) if rotations is None else rotations[layer]
        formats = own.stream_formats(few.keys.shape[-1], few.values.shape[-1])
        coded = streams_of(few, own, slow.get(layer))
        whole = streams_of(few, dataclasses.replace(own, mean=False), None)
        for key, rows, worth, stream, turn in zip(found, coded, whole, formats, turns, strict=True):
            found[key] += float(rows.felt(_error(rows.rows, stream, turn)) / worth.felt(worth.rows)) / len(facts)
    return found


def split(facts: Facts) -> tuple[Facts, Facts]:
    """The windows that teach and the last quarter of them, held back; moments are those of all."""
    assert facts.value_weights is not None
    windows = facts.keys.shape[1] // CONTEXT
    if windows < 2:
        raise ConfigError(f"calibration: blocks are learned from at least 2 windows of {CONTEXT} tokens, not {windows}")
    edge = (windows - max(1, windows // 4)) * CONTEXT
    parts = []
    for own in (slice(edge), slice(edge, windows * CONTEXT)):
        rows = {
            "keys": facts.keys[:, own],
            "values": facts.values[:, own],
            "value_weights": facts.value_weights[:, own],
        }
        parts.append(dataclasses.replace(facts, **rows))
    return parts[0], parts[1]


def _error(rows: Tensor, stream: StreamFormat, rotation: Rotation) -> Tensor:
    """What coding does to rows [num_kv_heads, tokens, width]."""
    codec = Codec.from_format(stream, rows.device)
    coded = dequantize(*quantize(rotate(rows[None], rotation), codec), codec)
    return rotate(coded, rotation, inverse=True)[0] - rows


def blocks_of(turns: Tensor) -> Tensor:
    """Matrices [..., 4, 4] of x -> left · x · conj(right) for quaternions [..., 2, 4], which are made unit here."""
    one = _UNITS[0]
    left, right = (
        torch.tensor(np.stack(parts), dtype=turns.dtype, device=turns.device)
        for parts in zip(*((so4_matrix(unit, one), so4_matrix(one, unit)) for unit in _UNITS), strict=True)
    )
    unit = turns / turns.norm(dim=-1, keepdim=True)
    by_left, by_right = torch.tensordot(unit[..., 0, :], left, 1), torch.tensordot(unit[..., 1, :], right, 1)
    blocks: Tensor = by_left @ by_right
    return blocks


def coordinate_weights(blocks: Tensor, moment: Tensor) -> Tensor:
    """What a squared error of each coordinate behind blocks [heads, width // 4, 4, 4] costs by a moment [heads, width,
    width] of what comes before them: [heads, width // 4, 4], the diagonal of B·M·Bᵀ.
    """
    heads, count = blocks.shape[:2]
    own = moment.view(heads, count, 4, count, 4).diagonal(dim1=1, dim2=3)
    return torch.einsum("hbij,hjkb,hbik->hbi", blocks, own, blocks)


def _turned_moment(moment: Tensor, rotation: Rotation) -> Tensor:
    """R·M·Rᵀ of symmetric M [heads, width, width]."""
    half_turned = rotate(moment[None], rotation).transpose(-1, -2).contiguous()
    return rotate(half_turned, rotation)[0]


def learned_rotation(rows: Rows, stream: StreamFormat, layer: int) -> Rotation:
    """The rotation that `stream` prescribes for a layer with learned blocks, never worse on the rows held back.

    Starts from the random ones of the format's seed. Half of the rows teach, in batches drawn with the same seed; on
    some of the others the best of every twentieth step is chosen.
    """
    heads, tokens, width = rows.rows.shape
    device = rows.rows.device
    start = build_rotation(stream, layer, heads, device=device)
    drawn = [quaternions(width, stream.seed, *stream.rotation_source(layer, head)) for head in range(heads)]
    turns = torch.tensor(np.stack(drawn), dtype=torch.float32, device=device).requires_grad_()
    spread = dataclasses.replace(start, blocks=None)
    before = Rows(rotate(rows.rows[None], spread)[0], None, rows.weights)
    moment = None if rows.moment is None else _turned_moment(rows.moment, spread)
    codec = Codec.from_format(stream, device)
    generator = torch.Generator().manual_seed(stream.seed)
    order = torch.randperm(tokens, generator=generator).to(device)
    teaching, judging = order[: tokens // 2], rows.part(order[tokens // 2 :][:_JUDGED])

    def expected(part: Rows) -> Tensor:
        blocks = blocks_of(turns)
        turned = torch.einsum("hbij,htbj->htbi", blocks, part.rows.view(heads, -1, width // 4, 4))
        coded = dequantize(*quantize(turned.detach().flatten(-2), codec), codec).view_as(turned)
        each = (coded - turned).square()
        if moment is not None:  # errors of two coordinates are as good as independent: each has a weight of its own
            each = each * coordinate_weights(blocks, moment)[:, None]
        return part.summed(each.flatten(-2).sum(-1))

    def judged() -> float:
        rotation = dataclasses.replace(start, blocks=blocks_of(turns.detach()).contiguous())
        return float(judging.felt(_error(judging.rows, stream, rotation)))

    optimizer = torch.optim.Adam([turns], lr=_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, _STEPS)
    with torch.enable_grad():
        best, least = turns.detach().clone(), judged()
        for step in range(_STEPS):
            picked = teaching[torch.randint(0, len(teaching), (_ROWS,), generator=generator).to(device)]
            optimizer.zero_grad()
            torch.autograd.backward(expected(before.part(picked)))
            optimizer.step()
            schedule.step()
            if step % 20 == 19 and (found := judged()) < least:
                best, least = turns.detach().clone(), found
    return dataclasses.replace(start, blocks=blocks_of(best).contiguous())


class _LearnedLayer(PackedLayer):
    """A packed layer with rotations of its own."""

    def __init__(
        self, config: KVCacheConfig, layer: int, slow: Tensor | None, rotations: tuple[Rotation, Rotation]
    ) -> None:
        super().__init__(config, layer, slow=slow)
        self._rotations = rotations

    def open_stores(
        self,
        key_format: StreamFormat,
        value_format: StreamFormat,
        num_kv_heads: int,
        device: torch.device,
        first_blocks: int,
    ) -> None:
        """As ever, with the learned rotations."""
        super().open_stores(key_format, value_format, num_kv_heads, device, first_blocks)
        assert self.keys is not None
        assert self.values is not None
        self.keys.rotation, self.values.rotation = self.keys.reading, self.values.reading = self._rotations


@dataclass(frozen=True)
class LearnedRotations:
    """The packed cache with learned blocks. config: in force; rotations: of keys and values, by model layer."""

    config: KVCacheConfig
    rotations: Mapping[int, tuple[Rotation, Rotation]]

    def new_cache(self, state: EnabledModel) -> PackedCache:
        """An empty cache for a model that is enabled with `config`."""

        def make_layer(config: KVCacheConfig, layer: int, max_tokens: int | None, slow: Tensor | None) -> PackedLayer:
            return _LearnedLayer(config, layer, slow, self.rotations[layer])

        return PackedCache(text_config(state.model), self.config, slow=state.slow, make_layer=make_layer)

    def summary(self, count: int) -> str:
        """One line on what is in force in `count` layers."""
        return f"kv={self.config.name}: {count} layers packed, with learned SO(4) blocks after Hadamard and signs"


def require_learnable(config: KVCacheConfig) -> None:
    """Raise ConfigError for a configuration without random SO(4) blocks, or whose codes stand for more than one
    coordinate, or differ between layers.
    """
    if config.rotation != "isoquant" or config.quantizer != "scalar" or config.allocation is not None:
        raise ConfigError(
            f"kv={config.name}: blocks are learned for rotation=isoquant, quantizer=scalar and one width of codes; "
            f"leave out --calibration, or take apart a preset like iso3"
        )


def learn(config: KVCacheConfig, name: str, facts: Mapping[int, Facts], slow: Mapping[int, Tensor]) -> LearnedRotations:
    """Learned blocks for every layer of a configuration that `require_learnable` lets pass; `name` is its new name.

    slow: by model layer, coordinates over which a mean may be removed.
    """
    require_learnable(config)
    rotations = {}
    for layer, one in facts.items():
        formats = config.stream_formats(one.keys.shape[-1], one.values.shape[-1])
        keys, values = streams_of(split(one)[0], config, slow.get(layer))
        rotations[layer] = learned_rotation(keys, formats[0], layer), learned_rotation(values, formats[1], layer)
    return LearnedRotations(dataclasses.replace(config, name=name), rotations)
