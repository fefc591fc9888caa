"""What is in force: per layer, how its cache is kept, at how many bits, and why."""

from dataclasses import asdict, dataclass
from typing import Any

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.geometry import LayerGeometry
from rotaryquant.kv import accounting

_STOCK_REASONS = {
    "sliding_attention": "a sliding window is bounded already",
    "chunked_attention": "a chunk is bounded already",
    "linear_attention": "state layer: no keys or values",
    "conv": "state layer: no keys or values",
    "dummy": "no cache of its own",
}


@dataclass(frozen=True)
class LayerReport:
    """One layer as it is in force.

    kept: "packed", "16-bit" or "none". key_bits, value_bits: of the codes, 0 where nothing is packed.
    row_bytes: packed bytes of one token's K and V in this layer. nbytes: bytes its cache holds now.
    note: why a layer is not packed, or what protection did.
    """

    index: int
    layer_type: str
    kept: str
    num_kv_heads: int
    head_dim: int
    key_bits: int
    value_bits: int
    row_bytes: int
    nbytes: int
    note: str


@dataclass(frozen=True)
class Report:
    """The answer to "what is in force" for a model and the cache it last used."""

    kv: str
    rotation: str
    layers: list[LayerReport]

    @property
    def packed(self) -> list[LayerReport]:
        """Layers whose cache is packed."""
        return [layer for layer in self.layers if layer.kept == "packed"]

    def summary(self) -> str:
        """One line: how many layers are packed, how, and what protection did."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            if layer.kept != "packed":
                counts[layer.note] = counts.get(layer.note, 0) + 1
        text = f"kv={self.kv}: {len(self.packed)} of {len(self.layers)} layers packed ({self.rotation})"
        text += "".join(f"; {count} left: {note}" for note, count in counts.items())
        protected = [f"layer {layer.index}: {layer.note}" for layer in self.packed if layer.note]
        return text + "".join(f"; {note}" for note in protected)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def build_report(kv: KVCacheConfig, geometry: list[LayerGeometry], cache: PackedCache | None) -> Report:
    """Report from the model's geometry and, where a cache has been used, what it did."""
    layers, rotation = [], kv.rotation
    for layer in geometry:
        packed = cache.packed_layer(layer.index) if cache is not None else None
        if not layer.packable:
            note = _STOCK_REASONS.get(layer.layer_type, f"layer type {layer.layer_type}")
            kept = "16-bit" if layer.num_kv_heads else "none"
            layers.append(
                LayerReport(
                    layer.index, layer.layer_type, kept, layer.num_kv_heads, layer.head_dim, 0, 0, 0, 0, note
                )
            )  # fmt: skip
            continue
        own = kv.of_layer(layer.index)
        keys, values = own.stream_formats(layer.head_dim, layer.head_dim)
        if keys.fit or values.fit:
            rotation = f"{kv.rotation}, fitted"
        note = ""
        if packed is not None and packed.keys is not None:
            keys = packed.keys.format
            if packed.finding is not None and packed.finding.action != "kept":
                found = packed.finding
                note = (
                    f"{found.action}: keys would err by {found.logit_error:.2g} nats per logit at {own.key_bits} bits"
                )
                note += f", kept at {found.bits}" if found.action == "boosted" else ""
        layers.append(
            LayerReport(
                layer.index,
                layer.layer_type,
                "packed",
                layer.num_kv_heads,
                layer.head_dim,
                keys.bits,
                values.bits,
                layer.num_kv_heads * (keys.row_bytes + values.row_bytes),
                packed.nbytes if packed is not None else 0,
                note,
            )
        )
    return Report(kv.name, rotation, layers)


def layer_bits(cache: PackedCache) -> list[accounting.LayerBits]:
    """Accounting records of the packed layers of a used cache. Raises ConfigError where nothing was packed yet."""
    found = []
    for layer in cache.packed_layers():
        stored = layer.stored()
        if stored is None:
            raise ConfigError(
                f"layer {layer.layer}: nothing is packed yet ({layer.columns} tokens); use a longer context"
            )
        found.append(stored)
    return found
