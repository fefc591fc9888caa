"""RotaryQuant: language models with a packed KV cache, and measurements of what that costs.

Importing this package starts no device, compiles nothing and patches nothing; transformers is imported by the
first call that needs it. Where transformers is imported too, it can load checkpoints with packed weights.
"""

from typing import TYPE_CHECKING, Any

from rotaryquant._registration import register as _register
from rotaryquant.config import KVCacheConfig, parse_kv

if TYPE_CHECKING:
    from rotaryquant.integrations.transformers.enable import EnabledModel, disable, enable, enabled
    from rotaryquant.integrations.transformers.packed_weights import RotaryQuantConfig

__version__ = "0.1.0"
__all__ = ["EnabledModel", "KVCacheConfig", "RotaryQuantConfig", "disable", "enable", "enabled", "parse_kv"]

_register()

_LAZY = {
    "EnabledModel": "enable", "disable": "enable", "enable": "enable", "enabled": "enable",
    "RotaryQuantConfig": "packed_weights",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"rotaryquant.integrations.transformers.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rotaryquant' has no attribute {name!r}")
