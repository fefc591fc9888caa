"""What each layer of a family keeps for a sequence, read from config.json alone: no transformers, no torch.

A family is known by `model_type`. What its configuration class of transformers fills in where a field is absent stands
in `_FAMILIES`, and the tests compare every family with the cache that transformers really builds. An unknown
`model_type` is refused: a formula for other layers can be wrong by tens of times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rotaryquant.errors import UnsupportedModelError

#: Recurrent states stay in fp32 whatever the dtype of the model.
_STATE_BYTES = 4

#: Names of layer types in older configurations.
_RENAMED = {"mamba": "state", "linear_attention": "state", "attention": "full", "full_attention": "full",
            "sliding_attention": "sliding", "chunked_attention": "sliding", "moe": "none", "mlp": "none"}  # fmt: skip

#: Letters of Nemotron's `hybrid_override_pattern`.
_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class KeptLayer:
    """What one layer keeps.

    kind: "full" attention, "sliding" (a window), "latent" (MLA: one latent and one RoPE row a token), "state"
    (recurrent), or "none". num_heads, num_kv_heads, key_width, value_width: 0 where there are no keys. window: tokens
    that a sliding layer sees, else 0. conv_values, state_values: values of a state layer, of one sequence.
    """

    index: int
    kind: str
    num_heads: int = 0
    num_kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    window: int = 0
    conv_values: int = 0
    state_values: int = 0

    @property
    def packable(self) -> bool:
        """Whether its keys and values can be packed: full attention alone."""
        return self.kind == "full"

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of a state layer for one sequence: the convolution's inputs in the model's dtype, the state in fp32."""
        return self.conv_values * element_bytes + self.state_values * _STATE_BYTES


@dataclass(frozen=True)
class Decoder:
    """What planning needs of a decoder's configuration.

    family: `model_type`. experts: routed ones in a layer, 0 without. experts_per_token: of them. tied: whether the
    head is the embedding. limit: tokens that positions are made for, 0 where none is stated.
    """

    family: str
    layers: tuple[KeptLayer, ...]
    experts: int
    experts_per_token: int
    hidden: int
    vocabulary: int
    tied: bool
    limit: int


class _Fields:
    """Fields of a decoder's configuration, with what its class fills in."""

    def __init__(self, config: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> None:
        self.family = family
        self._config, self._defaults = config, defaults

    def get(self, name: str) -> Any:
        """A field as it stands there, null included; of one that is absent what its class fills in, or None."""
        return self._config[name] if name in self._config else self._defaults.get(name)

    def number(self, *names: str) -> int:
        """The first of the fields that is neither absent nor null.

        Raises UnsupportedModelError where none is, or it is no count.
        """
        for name in names:
            if (value := self.get(name)) is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise UnsupportedModelError(
                        f"config.json: {name}={value!r} of {self.family} must be a whole number; "
                        f"take config.json from the model's own repository"
                    )
                return value
        raise UnsupportedModelError(
            f"config.json: {names[0]} of {self.family} is absent; take config.json from the model's own repository"
        )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; as many as of queries where the field is absent and the class says so."""
        return self.number("num_key_value_heads", "num_attention_heads")

    @property
    def width(self) -> int:
        """Width of a head: the explicit field, or hidden size over heads."""
        return self.number("head_dim") if self.get("head_dim") else self.number("hidden_size") // self.heads

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return max(1, self.number("num_attention_heads"))

    def kinds(self) -> list[str]:
        """Kind of each layer by `layer_types`, by the class's own rule where that is absent.

        Raises UnsupportedModelError for a type that is unknown.
        """
        named = self.get("layer_types") or self.get("layers_block_type")
        if named is None and self.get("hybrid_override_pattern"):
            named = [_PATTERN.get(letter, letter) for letter in self.get("hybrid_override_pattern")]
        if named is None:
            rule: Callable[[_Fields, int], str] = self.get("_rule") or (lambda fields, index: "full_attention")
            named = [rule(self, index) for index in range(self.number("num_hidden_layers"))]
        for name in named:
            if name not in _RENAMED:
                raise UnsupportedModelError(
                    f"config.json: layer type {name!r} of {self.family} is unknown; known: {', '.join(_RENAMED)}"
                )
        return [_RENAMED[name] for name in named]


def _every(period: str, default: int, first: str) -> Callable[[_Fields, int], str]:
    """Full attention in each layer whose number is a multiple of a field (or of its default), else `first`."""
    return lambda fields, index: "full_attention" if (index + 1) % (fields.get(period) or default) == 0 else first


def _after_windows(fields: _Fields, index: int) -> str:
    """Qwen 2 and 3: windows from layer `max_window_layers` on, where they are switched on."""
    sliding = bool(fields.get("use_sliding_window")) and bool(fields.get("sliding_window"))
    return "sliding_attention" if sliding and index >= fields.number("max_window_layers") else "full_attention"


def _before_windows(fields: _Fields, index: int) -> str:
    """Qwen2-MoE: windows in every other layer before `max_window_layers`, where they are switched on."""
    sliding = bool(fields.get("use_sliding_window")) and index < fields.number("max_window_layers")
    return "sliding_attention" if sliding and index % 2 == 0 else "full_attention"


def _windows_on(fields: _Fields, index: int) -> str:
    """Qwen3-MoE: windows everywhere, where they are switched on."""
    on = bool(fields.get("use_sliding_window")) and bool(fields.get("sliding_window"))
    return "sliding_attention" if on else "full_attention"


def _windows_stated(fields: _Fields, index: int) -> str:
    """Mistral: windows everywhere, where there is one."""
    return "sliding_attention" if fields.get("sliding_window") else "full_attention"


def _state(fields: _Fields) -> tuple[int, int]:
    """Values of the convolution and of the state of one recurrent layer."""
    if fields.get("linear_num_value_heads") is not None:  # gated delta rule
        key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
        key_width, value_width = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
        channels = 2 * key_heads * key_width + value_heads * value_width
        return channels * fields.number("linear_conv_kernel_dim"), value_heads * key_width * value_width
    heads, size = fields.number("mamba_num_heads", "mamba_n_heads"), fields.number("ssm_state_size", "mamba_d_state")
    width = fields.get("mamba_head_dim") or fields.get("mamba_d_head")
    if not isinstance(width, int):  # Granite's "auto"
        width = fields.number("mamba_expand") * fields.number("hidden_size") // heads
    channels = heads * width + 2 * fields.number("n_groups", "mamba_n_groups") * size
    return channels * fields.number("conv_kernel", "mamba_d_conv"), heads * width * size


def _layer(fields: _Fields, index: int, kind: str) -> KeptLayer:
    if kind == "none":
        return KeptLayer(index, kind)
    if kind == "state":
        conv, state = _state(fields)
        return KeptLayer(index, kind, conv_values=conv, state_values=state)
    if fields.get("kv_lora_rank") and kind == "full":
        ranks = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        return KeptLayer(index, "latent", fields.heads, 1, *ranks)
    width, kv_heads = fields.width, fields.kv_heads
    if kind == "full" and fields.get("global_head_dim"):  # Gemma 4
        width = fields.number("global_head_dim")
        if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads"):
            kv_heads = fields.number("num_global_key_value_heads")
    own = (fields.get("per_layer_config") or {}).get(str(index), {})
    width, kv_heads = int(own.get("head_dim", width)), int(own.get("num_key_value_heads", kv_heads))
    window = fields.number("sliding_window") if kind == "sliding" else 0
    if window and fields.get("use_bidirectional_attention") in (True, "all"):
        window = window // 2 + 1  # it looks both ways, so half as far
    return KeptLayer(index, kind, fields.heads, kv_heads, width, width, window)


_LINEAR: Mapping[str, Any] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "head_dim": 256, "num_key_value_heads": 2,
    "_rule": _every("full_attention_interval", 4, "linear_attention"),
}  # fmt: skip
_QWEN: Mapping[str, Any] = {"_rule": _after_windows, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA: Mapping[str, Any] = {
    "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_LATENT: Mapping[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

#: What a family's configuration class fills in where a field is absent. Keys with an underscore are rules.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"_rule": _windows_stated, "sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"_rule": _windows_stated, "num_key_value_heads": 8},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {**_QWEN, "_rule": _before_windows, "num_key_value_heads": 16},
    "qwen3_moe": {**_QWEN, "_rule": _windows_on, "num_key_value_heads": 4},
    "qwen3_next": _LINEAR,
    "qwen3_5_text": {**_LINEAR, "num_key_value_heads": 4},
    "qwen3_5_moe_text": _LINEAR,
    "gemma2": {**_GEMMA, "_rule": _every("", 2, "sliding_attention")},
    "gemma3_text": {**_GEMMA, "_rule": _every("sliding_window_pattern", 6, "sliding_attention")},
    "gemma3n_text": {
        **_GEMMA, "_rule": _every("", 5, "sliding_attention"), "num_kv_shared_layers": 15, "num_key_value_heads": 2,
        "sliding_window": 512,
    },
    "gemma4_text": {
        **_GEMMA, "_rule": _every("", 6, "sliding_attention"), "global_head_dim": 512, "sliding_window": 512,
        "_last": "full",
    },
    "nemotron_h": {
        "head_dim": 128, "num_key_value_heads": 8, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "n_groups": 8, "conv_kernel": 4,
    },
    "gpt_oss": {
        "_rule": _every("", 2, "sliding_attention"), "head_dim": 64, "sliding_window": 128, "num_key_value_heads": 8
    },
    "glm4_moe": {"num_key_value_heads": 8},
    "olmoe": {},
    "granitemoehybrid": {
        "_rule": lambda fields, index: "linear_attention", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_n_heads": 128,
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}  # fmt: skip


def _text(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The decoder's own part of a configuration, and its family."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        outer = str(config.get("model_type", ""))
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        return {**tied, **inner}, str(inner.get("model_type") or f"{outer}_text")
    return config, str(config.get("model_type", ""))


def _shared(fields: _Fields, kinds: Sequence[str]) -> list[str]:
    """The same with the layers that read another layer's keys left without any of their own."""
    shared = fields.number("num_kv_shared_layers") if fields.get("num_kv_shared_layers") else 0
    return [*kinds[: len(kinds) - shared], *["none"] * shared]


def read_decoder(config: Mapping[str, Any]) -> Decoder:
    """What each layer of a model keeps, and its experts. config: of config.json, also of a composite model.

    Raises UnsupportedModelError, naming the field, for a family or a layer type that is not known here.
    """
    text, family = _text(config)
    if family not in _FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type={family!r} is unknown to the planner, and nothing is guessed; "
            f"known: {', '.join(sorted(_FAMILIES))}"
        )
    fields = _Fields(text, family, _FAMILIES[family])
    kinds = fields.kinds()
    if fields.get("_last"):
        kinds[-1] = str(fields.get("_last"))
    layers = tuple(_layer(fields, index, kind) for index, kind in enumerate(_shared(fields, kinds)))
    experts = next((int(text[name]) for name in _EXPERTS if text.get(name)), 0)
    per_token = next((int(text[name]) for name in _PER_TOKEN if text.get(name)), 0)
    return Decoder(
        family,
        layers,
        experts,
        per_token,
        fields.number("hidden_size"),
        fields.number("vocab_size"),
        bool(fields.get("tie_word_embeddings")),
        fields.number("max_position_embeddings") if fields.get("max_position_embeddings") else 0,
    )


#: Names of the number of routed experts in a layer, and of those that a token goes to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
