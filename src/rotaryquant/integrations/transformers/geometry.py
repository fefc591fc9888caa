"""What a model's layers look like, read layer by layer from its configuration, and what cannot be packed."""

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from rotaryquant.errors import UnsupportedModelError

#: Arguments of the attention call that the packed path carries.
CARRIED = {"scaling", "softcap", "s_aux", "sliding_window", "dropout", "is_causal"}
#: Arguments that change nothing in attention itself.
HARMLESS = {
    "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states",
    "cache_position", "logits_to_keep", "cache", "past_key_values", "position_embeddings", "shared_kv_states",
}  # fmt: skip

#: Configuration fields that mean an attention this package does not carry, and why.
_REFUSED_FIELDS = {
    "kv_lora_rank": "latent attention (MLA) caches a latent and a RoPE part, which the packed layers do not hold yet",
    "index_topk": "sparse attention selects keys by an index",
    "alibi": "ALiBi adds a position bias to the logits",
}
_ATTENTION_NAME = re.compile(r"attn|attention|softcap|sink|alibi")
_EXTRA_ALLOWED = re.compile(r"^_attn|^attention_bias$|^attn_bias$|dropout|implementation|types$")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer of a model.

    index: its number in the model. layer_type: as transformers names it. packable: full attention with its own
    cache. num_heads, num_kv_heads, head_dim: 0 where the layer has no attention. window: of a sliding layer.
    """

    index: int
    layer_type: str
    packable: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def key_width(self) -> int:
        """Values of a key."""
        return self.head_dim

    @property
    def value_width(self) -> int:
        """Values of a value."""
        return self.head_dim


def text_config(model_or_config: PreTrainedModel | PretrainedConfig) -> PretrainedConfig:
    """The decoder's configuration, also of a composite (vision and text) model."""
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    return config.get_text_config(decoder=True)


def _width(config: PretrainedConfig) -> int:
    """Head width: the explicit field, or hidden size over heads only where that is absent."""
    width = getattr(config, "head_dim", None)
    return int(width) if width else int(config.hidden_size) // int(config.num_attention_heads)


def read_geometry(config: PretrainedConfig) -> list[LayerGeometry]:
    """Every layer of a decoder configuration. Per-layer fields win over the model's."""
    types, kwargs = get_layer_types_and_kwargs(config)
    layers = []
    for index, (kind, extra, layer) in enumerate(zip(types, kwargs, config.per_layer_config, strict=True)):
        attention = kind in ("full_attention", "sliding_attention", "chunked_attention")
        heads = int(getattr(layer, "num_attention_heads", 0) or 0) if attention else 0
        kv_heads = int(getattr(layer, "num_key_value_heads", None) or heads) if attention else 0
        layers.append(
            LayerGeometry(
                index,
                kind,
                kind == "full_attention",
                heads,
                kv_heads,
                _width(layer) if attention else 0,
                int(extra.get("sliding_window") or 0),
            )
        )
    return layers


def check_supported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError, naming the field, where attention does something the packed path does not carry."""
    config = text_config(model)
    for field, why in _REFUSED_FIELDS.items():
        if value := getattr(config, field, None):
            raise UnsupportedModelError(f"{config.model_type}: {field}={value!r}: {why}; use kv=fp16 for this model")
    declared = set(getattr(type(config), "__annotations__", {})) | set(vars(type(config)()))
    for field, value in vars(config).items():
        unknown = field not in declared and _ATTENTION_NAME.search(field) and not _EXTRA_ALLOWED.search(field)
        if unknown and value not in (None, False, 0):
            raise UnsupportedModelError(
                f"{config.model_type}: unknown attention field {field}={value!r} in the configuration; "
                f"remove it, or use kv=fp16 for this model"
            )
    classes = {type(module) for module in model.modules() if _is_attention(module)}
    if not classes:
        raise UnsupportedModelError(
            f"{config.model_type}: no module calls transformers' attention interface, so its attention cannot be "
            f"replaced; use kv=fp16 for this model"
        )
    for cls in classes:
        for name in attention_arguments(cls):
            if name not in CARRIED | HARMLESS:
                raise UnsupportedModelError(
                    f"{config.model_type}: {cls.__name__} passes {name!r} to attention, which the packed path does "
                    f"not carry; use kv=fp16 for this model"
                )


def _is_attention(module: object) -> bool:
    return hasattr(module, "layer_idx") and bool(_interface_calls(type(module)))


def _interface_calls(cls: type) -> list[ast.Call]:
    """Calls of `attention_interface` in the class's forward; none where its source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError, SyntaxError):
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface"
    ]


def attention_arguments(cls: type) -> set[str]:
    """Names of the keyword arguments that an attention class passes to the attention interface."""
    return {keyword.arg for call in _interface_calls(cls) for keyword in call.keywords if keyword.arg is not None}
