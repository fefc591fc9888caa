"""What each layer of a model keeps of a sequence, from config.json alone: keys and values, a latent, a state.

A family is in `_FAMILIES` or it is refused by its name: a formula that fits most models is 8 times off for windows and
3 times for hybrids. Fields that a file leaves out have the values that transformers gives them there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rotaryquant.errors import ModelFileError, UnsupportedModelError


class Kind(StrEnum):
    """What a layer keeps of a sequence."""

    FULL = "full attention"
    SLIDING = "sliding window"
    LATENT = "latent attention"
    STATE = "recurrent state"
    NONE = "nothing"  #: an MLP alone, or a layer that reads another one's keys and values


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    index: its number. num_heads: of queries. num_kv_heads, key_width, value_width: of what a token leaves behind; of a
    latent its own width as the key's and that of the RoPE part as the value's. window: of a sliding layer, in tokens.
    conv_values, state_values: of a recurrent layer, the former in the model's dtype, the latter in fp32.
    """

    index: int
    kind: Kind
    num_heads: int = 0
    num_kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    window: int = 0
    conv_values: int = 0
    state_values: int = 0

    @property
    def packable(self) -> bool:
        """Whether its keys and values can be packed."""
        return self.kind is Kind.FULL

    @property
    def values_per_token(self) -> int:
        """Values that a token adds: keys and values of all heads."""
        return self.num_kv_heads * (self.key_width + self.value_width)

    @property
    def values_by_head(self) -> int:
        """Values of a token that a query meets: keys and values once for each of its heads."""
        return self.num_heads * (self.key_width + self.value_width)

    def held_tokens(self, tokens: int) -> int:
        """Tokens of a sequence whose keys and values are held: no more than the window."""
        return min(tokens, self.window) if self.kind is Kind.SLIDING else tokens

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of a sequence that do not grow with it. element_bytes: of the model's dtype."""
        return self.conv_values * element_bytes + self.state_values * 4


@dataclass(frozen=True)
class Geometry:
    """What a configuration says of a decoder.

    model_type: as the file names it. max_tokens: the longest context, 0 where none is stated. experts_per_token: that
    a layer with routed experts runs, 0 without. hidden: width of the residual stream. vocabulary: tokens. dtype: in
    which the model computes, "" where the file does not say.
    """

    model_type: str
    layers: tuple[Layer, ...]
    max_tokens: int
    experts_per_token: int
    hidden: int
    vocabulary: int
    dtype: str


class _Fields:
    """A configuration's fields, with the defaults of its family."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given, self._defaults = given, defaults

    def get(self, *names: str) -> Any:
        """The first of these fields that is there, else the first default, else None."""
        for source in (self._given, self._defaults):
            for name in names:
                if name in source:
                    return source[name]
        return None

    def count(self, *names: str) -> int:
        """The same as a number of at least 0, None being 0. Raises ModelFileError for anything else."""
        value = self.get(*names)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise ModelFileError(f"config.json: {names[0]}={value!r} must be a whole number of at least 0")
        return int(value)

    def needed(self, *names: str) -> int:
        """The same, above 0. Raises ModelFileError otherwise."""
        value = self.count(*names)
        if value == 0:
            raise ModelFileError(f"config.json: {names[0]} is missing or 0; fetch the file again")
        return value


def _alternating(every: int) -> Callable[[_Fields], list[str]]:
    """Full attention in each `every`-th layer, a window in the others."""

    def kinds(fields: _Fields) -> list[str]:
        interval = fields.count("sliding_window_pattern") or every
        return [
            "sliding_attention" if (index + 1) % interval else "full_attention"
            for index in range(fields.needed("num_hidden_layers"))
        ]

    return kinds


def _full(fields: _Fields) -> list[str]:
    return ["full_attention"] * fields.needed("num_hidden_layers")


def _windowed(fields: _Fields) -> list[str]:
    """A window in every layer, where one is stated."""
    kind = "sliding_attention" if fields.count("sliding_window") else "full_attention"
    return [kind] * fields.needed("num_hidden_layers")


def _qwen_window(fields: _Fields) -> list[str]:
    """A window from layer `max_window_layers` on, where windows are used at all."""
    used = bool(fields.get("use_sliding_window")) and fields.count("sliding_window") > 0
    first = fields.count("max_window_layers")
    return [
        "sliding_attention" if used and index >= first else "full_attention"
        for index in range(fields.needed("num_hidden_layers"))
    ]


def _qwen2_moe(fields: _Fields) -> list[str]:
    """A window in every second of the first `max_window_layers` layers, where windows are used at all."""
    used, last = bool(fields.get("use_sliding_window")), fields.count("max_window_layers")
    return [
        "sliding_attention" if used and index < last and (index + 1) % 2 else "full_attention"
        for index in range(fields.needed("num_hidden_layers"))
    ]


def _qwen3_moe(fields: _Fields) -> list[str]:
    return _windowed(fields) if fields.get("use_sliding_window") else _full(fields)


def _interval(fields: _Fields) -> list[str]:
    """Full attention in each `full_attention_interval`-th layer, a recurrent state in the others."""
    interval = fields.count("full_attention_interval") or 4
    return [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(fields.needed("num_hidden_layers"))
    ]


#: Letters of `hybrid_override_pattern`.
_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron(fields: _Fields) -> list[str]:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return ["linear_attention", "moe", "full_attention", "mlp"]
    if unknown := set(pattern) - set(_PATTERN):
        raise ModelFileError(f"config.json: hybrid_override_pattern has {min(unknown)!r}; known: {', '.join(_PATTERN)}")
    return [_PATTERN[letter] for letter in pattern]


def _mamba(fields: _Fields) -> list[str]:
    return ["linear_attention"] * fields.needed("num_hidden_layers")


def _delta_state(fields: _Fields) -> tuple[int, int]:
    """Values of a gated delta rule's short convolution and state."""
    keys, values = fields.needed("linear_num_key_heads"), fields.needed("linear_num_value_heads")
    key_width, value_width = fields.needed("linear_key_head_dim"), fields.needed("linear_value_head_dim")
    columns = fields.needed("linear_conv_kernel_dim")
    return (2 * keys * key_width + values * value_width) * columns, values * key_width * value_width


def _nemotron_state(fields: _Fields) -> tuple[int, int]:
    """Values of a Mamba-2 block's short convolution and state."""
    inner = fields.needed("mamba_num_heads") * fields.needed("mamba_head_dim")
    state = fields.needed("ssm_state_size")
    columns = fields.needed("mamba_d_conv", "conv_kernel")
    return (inner + 2 * fields.needed("mamba_n_groups", "n_groups") * state) * columns, inner * state


def _granite_state(fields: _Fields) -> tuple[int, int]:
    """The same under Granite's names."""
    inner, state = fields.needed("mamba_expand") * fields.needed("hidden_size"), fields.needed("mamba_d_state")
    columns = fields.needed("mamba_d_conv")
    return (inner + 2 * fields.needed("mamba_n_groups") * state) * columns, inner * state


@dataclass(frozen=True)
class _Family:
    """How a configuration's layers are read.

    kinds: of its layers, where the file does not list them. defaults: of fields that a file may leave out. state: of a
    recurrent layer. latent: whether a token leaves a latent behind.
    """

    kinds: Callable[[_Fields], list[str]] = _full
    defaults: Mapping[str, Any] = field(default_factory=dict)
    state: Callable[[_Fields], tuple[int, int]] | None = None
    latent: bool = False


_DELTA = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256, "num_attention_heads": 16,
    "num_key_value_heads": 2, "hidden_size": 2048, "max_position_embeddings": 32768,
}  # fmt: skip
_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304, "num_hidden_layers": 26,
    "sliding_window": 4096, "max_position_embeddings": 131072, "vocab_size": 262208,
}  # fmt: skip
_GEMMA4 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "hidden_size": 2304,
    "num_hidden_layers": 30, "sliding_window": 512, "max_position_embeddings": 131072, "vocab_size": 262144,
}  # fmt: skip
_NEMOTRON = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 4096, "vocab_size": 131072,
}  # fmt: skip
_GRANITE = {"mamba_expand": 2, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_n_groups": 1}

#: By `model_type` of a decoder.
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(_windowed, {"sliding_window": 4096}),
    "mixtral": _Family(_windowed, {"num_experts_per_tok": 2, "num_key_value_heads": 8}),
    "olmoe": _Family(defaults={"num_experts_per_tok": 8}),
    "glm4_moe": _Family(defaults={"num_experts_per_tok": 8}),
    "qwen2": _Family(_qwen_window, {"sliding_window": 4096, "max_window_layers": 28}),
    "qwen3": _Family(_qwen_window, {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}),
    "qwen2_moe": _Family(_qwen2_moe, {"sliding_window": 4096, "max_window_layers": 28, "num_experts_per_tok": 4}),
    "qwen3_moe": _Family(_qwen3_moe, {"sliding_window": 4096, "num_experts_per_tok": 8}),
    "qwen3_next": _Family(_interval, {**_DELTA, "num_experts_per_tok": 10}, _delta_state),
    "qwen3_5_moe_text": _Family(_interval, {**_DELTA, "num_experts_per_tok": 8}, _delta_state),
    "gemma3_text": _Family(_alternating(6), _GEMMA3),
    "gemma4_text": _Family(_alternating(6), _GEMMA4),
    "gpt_oss": _Family(_alternating(2), {"sliding_window": 128, "head_dim": 64, "num_experts_per_tok": 4}),
    "nemotron_h": _Family(_nemotron, _NEMOTRON, _nemotron_state),
    "granitemoehybrid": _Family(_mamba, _GRANITE, _granite_state),
    "deepseek_v2": _Family(defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64}, latent=True),
    "deepseek_v3": _Family(
        defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts_per_tok": 8}, latent=True
    ),
}

#: Models of several parts, and what their decoder is.
_DECODERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5_moe": "qwen3_5_moe_text"}

#: Names of a layer's kind, those of older files too.
_KINDS = {
    "full_attention": Kind.FULL, "attention": Kind.FULL, "sliding_attention": Kind.SLIDING,
    "linear_attention": Kind.STATE, "mamba": Kind.STATE, "moe": Kind.NONE, "mlp": Kind.NONE,
}  # fmt: skip


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Every layer of a decoder. config: what config.json holds.

    Raises UnsupportedModelError for a family that nobody has described, ModelFileError for a field that is missing or
    no number.
    """
    own = config.get("text_config")
    nested = isinstance(own, Mapping)
    given: Mapping[str, Any] = own if isinstance(own, Mapping) else config
    whole = str(config.get("model_type", ""))
    name = str(given.get("model_type") or _DECODERS.get(whole, whole)) if nested else _DECODERS.get(whole, whole)
    family = _FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"config.json: model_type={whole or None!r} is not a family whose cache is known here, and nothing is "
            f"guessed; known: {', '.join(sorted((*_FAMILIES, *_DECODERS)))}"
        )
    fields = _Fields(given, family.defaults)
    dtype = given.get("dtype") or given.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
    return Geometry(
        whole or name,
        tuple(_layers(fields, family)),
        fields.count("max_position_embeddings"),
        fields.count("num_experts_per_tok", "top_k_experts"),
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        str(dtype),
    )


def _layers(fields: _Fields, family: _Family) -> list[Layer]:
    listed = fields.get("layer_types", "layers_block_type")
    names = family.kinds(fields) if listed is None else [str(name) for name in listed]
    if unknown := sorted(set(names) - set(_KINDS)):
        raise UnsupportedModelError(
            f"config.json: layer_types has {unknown[0]!r}, of which nobody knows what it keeps; known: "
            f"{', '.join(_KINDS)}"
        )
    own = len(names) - fields.count("num_kv_shared_layers")  # the last ones read those before them
    single = fields.get("per_layer_config") or {}
    return [
        _layer(index, _KINDS[name] if index < own else Kind.NONE, fields, family, single.get(str(index)) or {})
        for index, name in enumerate(names)
    ]


def _layer(index: int, kind: Kind, fields: _Fields, family: _Family, single: Mapping[str, Any]) -> Layer:
    """One layer. single: fields that are its alone, as transformers 5 writes them."""
    if kind is Kind.NONE:
        return Layer(index, kind)
    if kind is Kind.STATE:
        if family.state is None:
            raise UnsupportedModelError(
                f"config.json: layer {index} is recurrent, which its family has not been so far"
            )
        conv, state = family.state(fields)
        return Layer(index, kind, conv_values=conv, state_values=state)
    heads = fields.needed("num_attention_heads")
    if family.latent:
        return Layer(index, Kind.LATENT, heads, 1, fields.needed("kv_lora_rank"), fields.needed("qk_rope_head_dim"))
    kv_heads = fields.count("num_key_value_heads") or heads
    width = fields.count("head_dim") or fields.needed("hidden_size") // heads
    if kind is Kind.FULL and fields.get("global_head_dim") is not None:  # Gemma 4
        width = fields.needed("global_head_dim")
        if fields.get("attention_k_eq_v"):
            kv_heads = fields.count("num_global_key_value_heads") or kv_heads
    kv_heads, width = int(single.get("num_key_value_heads", kv_heads)), int(single.get("head_dim", width))
    window = fields.needed("sliding_window") if kind is Kind.SLIDING else 0
    return Layer(index, kind, heads, kv_heads, width, width, window)
