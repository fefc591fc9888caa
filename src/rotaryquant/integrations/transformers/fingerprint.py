"""Which checkpoint a file belongs to: hashes of a model's configuration and of a sample of its weights."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaryquant.integrations.transformers.geometry import text_config

#: Values of each parameter that are looked at.
_SAMPLED = 1024
#: Configuration fields that say how a checkpoint was loaded, not what it is.
_OF_LOADING = ("dtype", "torch_dtype", "_name_or_path", "name_or_path", "transformers_version", "use_cache")


def model_fingerprint(model: PreTrainedModel) -> str:
    """Hash of a model as it is loaded: its configuration and the first values of each of its parameters."""
    sample = {name: parameter.detach().reshape(-1)[:_SAMPLED] for name, parameter in model.named_parameters()}
    return _hash(text_config(model).to_dict(), sample)


def checkpoint_fingerprint(model: PreTrainedModel) -> str:
    """The same in whichever dtype a checkpoint is loaded: values are rounded to bfloat16 first."""
    config = {key: value for key, value in text_config(model).to_dict().items() if key not in _OF_LOADING}
    sample = {
        name: parameter.detach().reshape(-1)[:_SAMPLED].bfloat16() for name, parameter in model.named_parameters()
    }
    return _hash(config, sample)


def _hash(config: dict[str, Any], sample: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, values in sample.items():
        digest.update(name.encode())
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
