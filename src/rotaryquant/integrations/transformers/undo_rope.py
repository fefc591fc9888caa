"""Keys as they were before RoPE, for measurements of caches that keep them so."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.geometry import LayerGeometry, text_config

#: Tokens and positions at which it is tried whether RoPE can be undone.
_TOKENS, _POSITIONS = (3, 11), (0, 1, 13, 250)
#: How far keys that are the same may differ, as a share of their size: where nothing turned them, and where what did is
#: undone (bf16 rounds them by 2^-9).
_SAME, _UNDONE = 1e-5, 2e-2


class KeyRope:
    """RoPE on the keys of one layer, by the model's own rotary module and function, so that the order of pairs, scaling
    and coordinates that are not rotated are the model's.

    module: gives cos and sin of positions; None for a layer that rotates nothing. function: applies them.
    """

    def __init__(
        self, module: torch.nn.Module | None = None, function: Callable[..., Any] | None = None, layer_type: str = ""
    ) -> None:
        known = module is not None and function is not None
        self._module, self._function = (module, function) if known else (None, None)
        self._layer_type = layer_type

    def undo(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Keys before RoPE. rows: fp32 [heads, rows, width] as a cache holds them; positions: int64 [rows]."""
        cos, sin = self._angles(rows, positions)
        size = cos.square() + sin.square()  # some models scale both by s: the inverse of s·R is Rᵀ / s
        return self._turned(rows, cos / size, -sin / size)

    def redo(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Keys as a cache holds them; the same shapes."""
        return self._turned(rows, *self._angles(rows, positions))

    def gradients(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Gradients at keys before RoPE from those after it; the same shapes."""
        cos, sin = self._angles(rows, positions)
        return self._turned(rows, cos, -sin)

    def _angles(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._module is None:
            return torch.ones(1, device=rows.device), torch.zeros(1, device=rows.device)
        wanted = inspect.signature(self._module.forward).parameters
        arguments = {"layer_type": self._layer_type} if "layer_type" in wanted else {}
        with torch.no_grad():
            cos, sin = self._module(rows[None], positions[None].to(rows.device), **arguments)
        return cos, sin

    def _turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._function is None:
            return rows
        names = list(inspect.signature(self._function).parameters)
        given = dict.fromkeys(names[: names.index("cos")], rows[None])
        with torch.no_grad():
            made = self._function(**given, cos=cos, sin=sin)
        turned: Tensor = made[-1] if isinstance(made, tuple) else made
        return turned[0]


def key_ropes(model: PreTrainedModel, layers: list[LayerGeometry]) -> dict[int, KeyRope]:
    """RoPE of each packable layer, by its number in the model, which must not be enabled.

    A token that is alone attends to itself, so that its keys differ between positions by RoPE and nothing else: every
    layer is tried that way. Raises UnsupportedModelError where a layer's RoPE cannot be undone.
    """
    module = next((m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"), None)
    kinds = getattr(module, "rope_type", "")
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if "dynamic" in kind or kind == "longrope":
            raise _refusal(model, f"its angles depend on the length of the text (rope_type={kind!r})")
    function = _rotary_function(model)
    positions = torch.tensor(_POSITIONS, device=next(model.parameters()).device)
    seen = [_lone_keys(model, token, positions) for token in _TOKENS]
    found: dict[int, KeyRope] = {}
    for layer in layers:
        if not layer.packable:
            continue
        keys = torch.cat([one[layer.index] for one in seen])
        without, turned = _spread(keys), KeyRope(module, function, layer.layer_type)
        if without <= _SAME:
            found[layer.index] = KeyRope()
        elif _spread(turned.undo(keys, positions)) <= min(_UNDONE, without / 4):
            found[layer.index] = turned
        else:
            raise _refusal(model, f"what the keys of layer {layer.index} are turned by is unknown")
    return found


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{text_config(model).model_type}: RoPE cannot be undone, {why}; choose a peer that keeps keys after RoPE"
    )


def _rotary_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """What the model's attention applies cos and sin with; None where its arguments are others than rows and those."""
    for part in model.modules():
        function = getattr(sys.modules[type(part).__module__], "apply_rotary_pos_emb", None)
        if function is None or not hasattr(part, "layer_idx"):
            continue
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        rows = names[: names.index("cos")] if "cos" in names else []
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        if rows and needed <= {*rows, "cos", "sin"}:
            found: Callable[..., Any] = function
            return found
    return None


def _lone_keys(model: PreTrainedModel, token: int, positions: Tensor) -> dict[int, Tensor]:
    """Keys of a token that is alone at each of `positions`, by layer: fp32 [heads, positions, width]."""
    cache = DynamicCache(config=model.config)
    ids = torch.full((len(positions), 1), token, device=positions.device)
    with torch.inference_mode():
        model(ids, position_ids=positions[:, None], cache=cache, logits_to_keep=1)
    found = {}
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4:
            found[index] = keys[:, :, 0].transpose(0, 1).float()
    return found


def _spread(keys: Tensor) -> float:
    """How far keys differ between positions, as a share of their size: [heads, positions, width]."""
    return float((keys - keys[:, :1]).norm() / keys.norm())
