"""Switch a model to a packed cache and back: plain transformers calls work in between."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rotaryquant.allocation import Allocation
from rotaryquant.config import KVCacheConfig, parse_kv
from rotaryquant.errors import CalibrationError, ConfigError
from rotaryquant.integrations.transformers import attention, masks
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
from rotaryquant.integrations.transformers.geometry import LayerGeometry, check_supported, read_geometry, text_config
from rotaryquant.integrations.transformers.report import Report, build_report
from rotaryquant.integrations.transformers.rope import slow_coordinates

_STATE = "_rotaryquant"
_STATIC = ("static", "offloaded_static", "hybrid", "hybrid_chunked", "sliding_window")


class EnabledModel:
    """What `enable` returns: the configuration in force, the model's last cache and a report.

    kv: the configuration. cache: the last cache this made for the model (None before the first call).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCacheConfig,
        geometry: list[LayerGeometry],
        slow: dict[int, torch.Tensor],
    ) -> None:
        self.model = model
        self.kv = kv
        self.geometry = geometry
        self.slow = slow
        self.cache: PackedCache | None = None
        self._undo: list[Callable[[], None]] = []

    def new_cache(self, max_tokens: int | None = None) -> PackedCache:
        """An empty cache for this model; pass it as `cache=` to calls that should share it."""
        self.cache = PackedCache(text_config(self.model), self.kv, max_tokens, self.slow)
        return self.cache

    def report(self) -> Report:
        """What is in force, per layer."""
        return build_report(self.kv, self.geometry, self.cache)

    def accept(self, cache: object) -> PackedCache:
        """The caller's cache, if it is one of ours with this configuration. Raises ConfigError otherwise."""
        if not isinstance(cache, PackedCache):
            raise ConfigError(
                f"cache is a {type(cache).__name__}, but kv={self.kv.name} is in force for this model; pass "
                f"cache=enabled.new_cache(), no cache, or call rotaryquant.disable(model)"
            )
        if cache.kv != self.kv:
            raise ConfigError(f"cache was made for kv={cache.kv.name}, but kv={self.kv.name} is in force")
        self.cache = cache
        return cache


def enable(model: PreTrainedModel, kv: str | KVCacheConfig = "iso3") -> EnabledModel | None:
    """Keep the keys and values of `model`'s full-attention layers packed from now on.

    kv: a `--kv` SPEC (config.PRESETS) or a configuration; "fp16" switches packing off. Plain calls of
    `model.generate` and `model(...)` then use a packed cache. Returns None for fp16.
    Raises UnsupportedModelError or ConfigError before anything is changed.
    """
    config = parse_kv(kv)
    if config is None:
        disable(model)
        return None
    check_supported(model)
    geometry = read_geometry(text_config(model))
    if not any(layer.packable for layer in geometry):
        kinds = sorted({layer.layer_type for layer in geometry})
        raise ConfigError(f"kv={config.name}: no layer of this model can be packed, its layers are {', '.join(kinds)}")
    if config.allocation is not None:
        _check_allocation(model, config.name, config.allocation)
    for layer in geometry:
        if layer.packable:
            _check_rotation(config.of_layer(layer.index), layer)
    slow = slow_coordinates(model, geometry, config.mean_period) if config.mean else {}
    disable(model)
    attention.register()
    masks.register()
    state = EnabledModel(model, config, geometry, slow)
    _switch_attention(model, state)
    _override(model, state, "_prepare_cache_for_generation", _prepare_cache)
    _override(model, state, "_prefill", _prefill)
    hook = model.register_forward_pre_hook(functools.partial(_give_cache, state), with_kwargs=True)
    state._undo.append(hook.remove)
    setattr(model, _STATE, state)
    return state


def disable(model: PreTrainedModel) -> None:
    """Leave the model as it was before `enable`; does nothing where it was not enabled."""
    state: EnabledModel | None = getattr(model, _STATE, None)
    if state is None:
        return
    for undo in reversed(state._undo):
        undo()
    delattr(model, _STATE)


@contextmanager
def enabled(model: PreTrainedModel, kv: str | KVCacheConfig = "iso3") -> Iterator[EnabledModel | None]:
    """`enable` for the length of a `with` block."""
    state = enable(model, kv)
    try:
        yield state
    finally:
        disable(model)


def _check_allocation(model: PreTrainedModel, name: str, allocation: Allocation) -> None:
    """Raise CalibrationError where the bits of each layer were chosen for another checkpoint."""
    if (own := checkpoint_fingerprint(model)) != allocation.model:
        raise CalibrationError(
            f"kv={name}: calibrated for a checkpoint with fingerprint {allocation.model}, this one has {own}; run "
            f"`rotaryquant calibrate` on it"
        )


def _check_rotation(config: KVCacheConfig, layer: LayerGeometry) -> None:
    """Build the layer's tables once: a width that cannot be packed is refused here.

    The codebook takes a fifth of a second, which is not left to the middle of an answer.
    """
    from rotaryquant.formats.codebook import codebook
    from rotaryquant.ops.rotate import build_rotation

    for stream in config.stream_formats(layer.head_dim, layer.head_dim):
        try:
            build_rotation(stream, layer.index, layer.num_kv_heads)
            codebook(stream.width, stream.bits)
        except ValueError as error:
            raise ConfigError(f"layer {layer.index}: {error}") from error


def _switch_attention(model: PreTrainedModel, state: EnabledModel) -> None:
    """Route the decoder's attention through ours; towers of a composite model keep theirs."""
    top, decoder = model.config, text_config(model)
    before = decoder._attn_implementation
    key = next((name for name in getattr(top, "sub_configs", {}) if getattr(top, name, None) is decoder), None)

    def choose(name: str) -> None:
        model.set_attn_implementation(name if key is None else {key: name})

    choose(masks.NAME)
    state._undo.append(lambda: choose(before))


def _override(model: PreTrainedModel, state: EnabledModel, name: str, replacement: Callable[..., Any]) -> None:
    """Shadow a method on this instance alone, until `disable`."""
    original = getattr(model, name)
    bound = types.MethodType(functools.partial(replacement, state, original), model)
    setattr(model, name, bound)
    state._undo.append(lambda: delattr(model, name))


def _prepare_cache(
    state: EnabledModel,
    original: Callable[..., Any],
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Give `generate` a packed cache, honouring what its options ask of it."""
    given = model_kwargs.get("cache")
    if given is not None:
        state.accept(given)
        return original(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    wanted = generation_config.cache_implementation
    if generation_config.use_cache is False:
        return None
    if wanted in (None, "dynamic"):
        model_kwargs["cache"] = state.new_cache()
    elif wanted in _STATIC:
        length = max(max_cache_length, generation_config.max_cache_len or 0)
        model_kwargs["cache"] = state.new_cache(max_tokens=length)
    else:
        raise ConfigError(
            f"cache_implementation={wanted!r} contradicts kv={state.kv.name}; drop it, or call "
            f"rotaryquant.disable(model)"
        )
    if generation_config.is_assistant:
        model_kwargs["cache"].activate_past_recording()
    return None


def _prefill(
    state: EnabledModel,
    original: Callable[..., Any],
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Run the prompt with the cache told that it is one."""
    cache = model_kwargs.get("cache")
    if not isinstance(cache, PackedCache):
        return original(input_ids, generation_config, model_kwargs, **kwargs)
    with cache.prefill():
        return original(input_ids, generation_config, model_kwargs, **kwargs)


def _give_cache(
    state: EnabledModel, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a plain `model(...)`: put in a packed cache where transformers would make a stock one."""
    name = "past_key_values" if kwargs.get("past_key_values") is not None else "cache"
    given = kwargs.get(name)
    if given is not None:
        if isinstance(given, Cache):
            state.accept(given)
        return None
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = text_config(state.model).use_cache
    if not use_cache or model.training:
        return None
    kwargs = {key: value for key, value in kwargs.items() if key != "past_key_values"}
    kwargs["cache"] = state.new_cache()
    return args, kwargs
