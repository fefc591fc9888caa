"""What users set: frozen, checked when built, unknown keys refused."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from rotaryquant.allocation import Allocation, allocate, everywhere
from rotaryquant.errors import ConfigError
from rotaryquant.formats.calibration import read_calibration
from rotaryquant.formats.codebook import BITS, QUANTIZERS, TRELLISES
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.formats.rotation import KINDS

PREFILLS = ("deferred", "streaming")
#: Scale → rules (formats.kv.SCALE_RULES) of keys and values.
SCALES = {"best": ("score", "score"), "mse": ("score", "value"), "norm": ("norm", "norm")}


@dataclass(frozen=True)
class KVCacheConfig:
    """How keys and values of full-attention layers are kept.

    key_bits, value_bits: bits of the codes. rotation: formats.rotation.KINDS. signs: random signs before it.
    quantizer: of codes of up to 4 bits, "trellis" (a quarter to a third less error, a dearer write) or "scalar".
    scale: "best" (unbiased products for keys and values), "mse" (values by least squares: each is closer, but all are
    too short) or "norm" (as TurboQuant publishes it). sinks: first tokens kept exact beside their codes. tail: newest
    tokens that stay exact (up to 32 more do: they are packed 32 at a time), 0 for none. mean: subtract a dominating
    key mean, taken from the first block over coordinates whose RoPE period is at least `mean_period` tokens. tau:
    share of a head's key energy that mean must carry. correct: share of the code noise's mean effect on the softmax
    that is taken off packed logits (0 to 1). protect: give the keys of layers with an expected logit error above
    `max_logit_error` nats 8 bits. prefill: "deferred" or "streaming". inverse: rotate the output back (off only to see
    it fail). seed: of the rotation. allocation: bits of each layer of one checkpoint, in place of key_bits and
    value_bits (`allocation.allocate`); a SPEC has them from `calibration=FILE`. key_fit, value_fit: of one layer, the
    spaces in which its rows are coded (formats.fit), keys less a mean that comes with it.
    """

    name: str = "iso3"
    key_bits: int = 3
    value_bits: int = 3
    quantizer: str = "scalar"
    rotation: str = "isoquant"
    signs: bool = True
    scale: str = "best"
    sinks: int = 4
    tail: int = 48
    mean: bool = True
    tau: float = 0.1
    mean_period: int = 8192
    correct: float = 1.0
    protect: bool = True
    max_logit_error: float = 2.0
    prefill: str = "deferred"
    inverse: bool = True
    seed: int = 0
    allocation: Allocation | None = None
    key_fit: Fit | None = field(default=None, repr=False)
    value_fit: Fit | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, valid in (
            ("key_bits", BITS),
            ("value_bits", BITS),
            ("quantizer", QUANTIZERS),
            ("rotation", tuple(KINDS)),
            ("scale", SCALES),
            ("prefill", PREFILLS),
        ):
            if (value := getattr(self, name)) not in valid:
                raise ConfigError(f"kv {name}={value!r} is unknown; valid: {', '.join(map(str, valid))}")
        if not 0 <= self.sinks <= BLOCK:
            raise ConfigError(f"kv sinks={self.sinks} must be between 0 and {BLOCK}")
        if (isinstance(self.tail, bool) and self.tail) or self.tail < 0:
            raise ConfigError(f"kv tail={self.tail} must be a number of tokens, 0 for none")
        if not 0.0 <= self.tau <= 1.0:
            raise ConfigError(f"kv tau={self.tau} must be between 0 and 1")
        if not 0.0 <= self.correct <= 1.0:
            raise ConfigError(f"kv correct={self.correct} must be between 0 and 1")
        if self.max_logit_error <= 0:
            raise ConfigError(f"kv max_logit_error={self.max_logit_error} must be above 0")

    def of_layer(self, index: int) -> "KVCacheConfig":
        """What holds for model layer `index` alone. Raises ConfigError where an allocation has no bits for it."""
        if self.allocation is None:
            return self
        widths = self.allocation.of_layer(index)
        if widths is None:
            raise ConfigError(f"kv={self.name}: layer {index} was not calibrated; run `rotaryquant calibrate` again")
        return dataclasses.replace(
            self,
            key_bits=widths.key_bits,
            value_bits=widths.value_bits,
            key_fit=widths.key_fit,
            value_fit=widths.value_fit,
            allocation=None,
        )

    def quantizer_of(self, bits: int) -> str:
        """The quantizer of codes of that width."""
        return self.quantizer if bits in TRELLISES else "scalar"

    def stream_formats(self, key_width: int, value_width: int) -> tuple[StreamFormat, StreamFormat]:
        """Formats of the keys and the values of a layer with these head widths.

        Raises ConfigError for a width that cannot be packed, and where each layer has bits of its own (`of_layer`).
        """
        if self.allocation is not None:
            raise ConfigError(f"kv={self.name}: every layer has bits of its own, so this needs a whole model")
        rules = SCALES[self.scale]
        mean, tau = ("block0", self.tau) if self.mean else ("none", 0.0)
        key_fit, value_fit = ("" if fit is None else fit.digest for fit in (self.key_fit, self.value_fit))
        if key_fit:
            mean, tau = "model", 0.0
        try:
            keys = StreamFormat(
                "key", key_width, self.key_bits, rules[0], self.rotation, self.seed, self.signs,
                mean=mean, tau=tau, quantizer=self.quantizer_of(self.key_bits), fit=key_fit,
            )  # fmt: skip
            values = StreamFormat(
                "value", value_width, self.value_bits, rules[1], self.rotation, self.seed, self.signs,
                quantizer=self.quantizer_of(self.value_bits), fit=value_fit,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return keys, values


_STRICT = KVCacheConfig("iso3-strict", sinks=0, tail=0, mean=False, correct=0.0, protect=False)

#: Names that `--kv` takes. `fp16` means: leave the cache alone.
PRESETS: dict[str, KVCacheConfig | None] = {
    "fp16": None,
    "iso3": KVCacheConfig("iso3"),
    "iso3-strict": _STRICT,
    "iso3t": KVCacheConfig("iso3t", quantizer="trellis"),
    "iso2": KVCacheConfig("iso2", key_bits=2, value_bits=2),
    "iso2t": KVCacheConfig("iso2t", key_bits=2, value_bits=2, quantizer="trellis"),
    "iso4": KVCacheConfig("iso4", key_bits=4, value_bits=4),
    "iso4t": KVCacheConfig("iso4t", key_bits=4, value_bits=4, quantizer="trellis"),
    "k4v3": KVCacheConfig("k4v3", key_bits=4, value_bits=3),
    "turbo3": dataclasses.replace(_STRICT, name="turbo3", rotation="dense", scale="norm"),
}

#: What `key=value` pairs may set: fields, and the file that makes an allocation with what it takes.
_MADE = ("name", "allocation", "key_fit", "value_fit")
_FIELDS = [one.name for one in dataclasses.fields(KVCacheConfig) if one.name not in _MADE]
_CALIBRATION, _BUDGET, _FIT = "calibration", "budget", "fit"
_KEYS = (*_FIELDS, _CALIBRATION, _BUDGET, _FIT)
#: Counts for which "off" means 0.
_COUNTS_OFF = ("sinks", "tail")
_SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False}


def _parse_value(key: str, text: str) -> object:
    current = getattr(KVCacheConfig(), key)
    try:
        if isinstance(current, bool):
            return _SWITCH[text.lower()]
        if text.lower() == "off" and key in _COUNTS_OFF:
            return 0
        return type(current)(text)
    except (KeyError, ValueError):
        wanted = "on or off" if isinstance(current, bool) else f"a value like {current!r}"
        raise ConfigError(f"kv {key}={text!r}: wanted {wanted}") from None


def parse_kv(spec: "str | KVCacheConfig | None") -> KVCacheConfig | None:
    """The configuration that a `--kv` SPEC names; None means 16-bit, nothing packed.

    spec: a preset, `key=value` pairs, or a preset followed by pairs, comma-separated ("iso3,sinks=0"). With
    `calibration=FILE` each layer gets bits of its own, whose mean is `budget`, or else the mean of the preset's, and
    rows are coded as fits them there, unless `fit=off`. Raises ConfigError with the valid names
    for an unknown preset or key, or a value that does not fit, and CalibrationError for a file that cannot be used.
    """
    if spec is None or isinstance(spec, KVCacheConfig):
        return spec
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"kv={spec!r} is empty; valid presets: {', '.join(PRESETS)}")
    base: KVCacheConfig | None = PRESETS["iso3"]
    if "=" not in parts[0]:
        if parts[0] not in PRESETS:
            raise ConfigError(f"kv={parts[0]!r} is unknown; valid presets: {', '.join(PRESETS)}, or key=value pairs")
        base = PRESETS[parts.pop(0)]
    if not parts:
        return base
    if base is None:
        raise ConfigError(f"kv={spec!r}: fp16 packs nothing, so it takes no options")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"kv option {part!r} is unknown; valid keys: {', '.join(_KEYS)}")
        if key in given:
            raise ConfigError(f"kv option {key!r} is given twice in {spec!r}")
        given[key] = text
    changes = {key: _parse_value(key, text) for key, text in given.items() if key in _FIELDS}
    made = dataclasses.replace(base, name=spec_name(spec), **changes)  # type: ignore[arg-type]
    return _calibrated(made, given.get(_CALIBRATION), given.get(_BUDGET), given.get(_FIT))


def spec_name(spec: str) -> str:
    """A SPEC as reports show it: of a file its last part, since folders differ by machine."""
    pairs = [part.partition("=") for part in spec.split(",")]
    return ",".join(
        f"{key}={Path(text).name}" if key.strip() == _CALIBRATION else key + equals + text
        for key, equals, text in pairs
    )


def _calibrated(config: KVCacheConfig, file: str | None, budget: str | None, fit: str | None) -> KVCacheConfig:
    """The configuration with bits for each layer, where a file is given to choose them by."""
    if file is None:
        for key, value, what in ((_BUDGET, budget, "shares bits out"), (_FIT, fit, "codes rows")):
            if value is not None:
                raise ConfigError(f"kv {key}={value!r} {what} by a calibration; add calibration=FILE")
        return config
    if fit is not None and fit.lower() not in _SWITCH:
        raise ConfigError(f"kv fit={fit!r}: wanted on or off")
    try:
        bits = (config.key_bits + config.value_bits) / 2 if budget is None else float(budget)
    except ValueError:
        raise ConfigError(f"kv budget={budget!r}: wanted bits a value, like 2.5") from None
    fitted = fit is None or _SWITCH[fit.lower()]
    calibration = read_calibration(file)
    if budget is None and not calibration.probe_bits:
        made = everywhere(calibration, config.key_bits, config.value_bits, fitted=fitted)
    else:
        made = allocate(calibration, bits, config.quantizer, fitted=fitted)
    return dataclasses.replace(config, allocation=made)
