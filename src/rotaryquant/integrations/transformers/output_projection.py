"""The weights that the output of a layer's attention goes through."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.packed_modules import PackedLinear

#: What families call it.
_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_projection(model: PreTrainedModel, layer: int) -> Tensor:
    """Weight [hidden, num_heads · width] of the projection at the end of a model layer's attention.

    Raises UnsupportedModelError where the layer has none under a known name.
    """
    for module in model.modules():
        if getattr(module, "layer_idx", None) != layer:
            continue
        for name in _NAMES:
            found = getattr(module, name, None)
            if isinstance(found, nn.Linear):
                return found.weight
            if isinstance(found, PackedLinear):
                return found.unpacked()
    raise UnsupportedModelError(
        f"layer {layer}: its attention ends in no linear layer called {', '.join(_NAMES)}, so the errors of its values "
        f"cannot be weighted"
    )
