"""What planning reads of a checkpoint: its configuration, and the headers of its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotaryquant.errors import ConfigError, ModelFileError, UnsupportedModelError
from rotaryquant.formats.gguf import GgufHeader, read_gguf_header
from rotaryquant.models.layers import Decoder, read_decoder
from rotaryquant.models.roles import KEPT, UP_INPUTS, Role, layer_number, packed_name, roles_of
from rotaryquant.weights.headers import TensorInfo, read_folder, refuse_pointer
from rotaryquant.weights.packed_config import METHOD, PackedConfig

#: Tensors of heads that predict several tokens ahead, which transformers leaves in the file.
_AHEAD = "mtp."

#: GGUF architecture → family of transformers, for layers that are all alike.
_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as its headers describe it. One is equal to itself alone, so that what is worked out of it can be kept.

    tensors: those that are loaded, without a head that is the embedding. roles: of each by name. packed: how they are
    packed, None where they are not. source: "safetensors", or "gguf", whose tensors are bf16 once converted. left:
    bytes of tensors that stay in the files.
    """

    name: str
    decoder: Decoder
    tensors: tuple[TensorInfo, ...]
    roles: Mapping[str, Role] = field(repr=False)
    packed: PackedConfig | None
    source: str
    left: int

    @property
    def nbytes(self) -> int:
        """Bytes of what is loaded."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def element_bytes(self) -> int:
        """Bytes of one value of the dtype that the model runs in: 4 where all is stored in fp32, else 2."""
        return 4 if {tensor.dtype for tensor in self.tensors} == {"F32"} else 2


def checkpoint(name: str, config: Mapping[str, Any], tensors: Sequence[TensorInfo], source: str) -> Checkpoint:
    """The checkpoint that a configuration and tensors make.

    config: of config.json. Raises UnsupportedModelError for a family or a tensor of which nothing is known, and
    ModelFileError where the model is quantised in a way that this package does not load.
    """
    decoder = read_decoder(config)
    quantised = config.get("quantization_config")
    if quantised is not None and quantised.get("quant_method") != METHOD:
        raise UnsupportedModelError(
            f"config.json: quantization_config has quant_method={quantised.get('quant_method')!r}, of which nothing is "
            f"known here; plan the checkpoint that is not quantised, with --recipe"
        )
    packed = PackedConfig.from_dict(quantised) if quantised is not None else None
    layers, loaded = len(decoder.layers), []
    for tensor in tensors:
        layer = layer_number(tensor.name)
        if not tensor.name.startswith(_AHEAD) and (layer is None or layer < layers):
            loaded.append(tensor)
    roles = roles_of(tensor.name for tensor in loaded)
    if decoder.tied:
        loaded = [tensor for tensor in loaded if roles[tensor.name] is not Role.HEAD]
    if not any(roles[tensor.name] is Role.EMBEDDING for tensor in loaded):
        raise ModelFileError(f"{name}: no tensor is an embedding; these are not the weights of a language model")
    left = sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in loaded)
    return Checkpoint(name, decoder, tuple(loaded), roles, packed, source, left)


def read_checkpoint(path: Path, name: str) -> Checkpoint:
    """The checkpoint of a model folder or a GGUF file.

    Raises ModelFileError, naming the file, where it is absent or damaged, UnsupportedModelError as `checkpoint`.
    """
    if path.is_dir():
        return checkpoint(name, read_config(path), read_folder(path), "safetensors")
    refuse_pointer(path)
    try:
        header = read_gguf_header(path)
    except ValueError as error:
        raise ModelFileError(f"{path}: {error}; fetch the file again") from error
    tensors = [
        TensorInfo(tensor.name, "BF16", tuple(reversed(tensor.shape)), 2 * tensor.elements, path)
        for tensor in header.tensors
        if not tensor.name.startswith("rope_freqs")
    ]
    return checkpoint(name, _gguf_config(path, header, tensors), tensors, "gguf")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder as plain values. Raises ModelFileError where it is absent or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFileError(f"{folder}: no config.json; a model folder holds config.json and safetensors files")
    refuse_pointer(path)
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFileError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{path}: holds a {type(config).__name__}, wanted an object; fetch the file again")
    return config


def _gguf_config(path: Path, header: GgufHeader, tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """Fields of config.json as a GGUF header tells them."""
    kind = str(header.metadata.get("general.architecture", ""))
    if kind not in _GGUF_FAMILIES:
        raise UnsupportedModelError(
            f"{path}: general.architecture={kind!r}: of GGUF files the planner knows {', '.join(_GGUF_FAMILIES)}; "
            f"plan the safetensors folder of this model instead"
        )

    def count(field: str) -> int | None:
        value = header.metadata.get(f"{kind}.{field}")
        return None if value is None else int(value)

    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    fields = {
        "hidden_size": count("embedding_length"), "num_hidden_layers": count("block_count"),
        "num_attention_heads": count("attention.head_count"), "num_key_value_heads": count("attention.head_count_kv"),
        "head_dim": count("attention.key_length"), "max_position_embeddings": count("context_length"),
        "num_experts": count("expert_count"), "num_experts_per_tok": count("expert_used_count"),
        "vocab_size": embedding.shape[0] if embedding is not None else None,
    }  # fmt: skip
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    known = {name: value for name, value in fields.items() if value is not None}
    return {"model_type": _GGUF_FAMILIES[kind], "tie_word_embeddings": tied, **known}


def matrices(checkpoint: Checkpoint) -> dict[str, Role]:
    """Roles of the tensors that a recipe may round: matrices, and stacks of them."""
    known = ((one.name, checkpoint.roles[one.name]) for one in checkpoint.tensors if len(one.shape) in (2, 3))
    return {name: role for name, role in known if role not in KEPT}


def is_scale(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the scales of a packed one, or factors of its inputs."""
    return checkpoint.packed is not None and (packed_name(name) != name or name.endswith(UP_INPUTS))


def refuse_packed(checkpoint: Checkpoint, recipe: str) -> None:
    """Raise ConfigError where a recipe is asked of a checkpoint that is packed already."""
    if checkpoint.packed is not None:
        raise ConfigError(
            f"--recipe {recipe}: {checkpoint.name} is packed already by {checkpoint.packed.recipe!r}; plan it as-is, "
            f"or name the checkpoint that it was made from"
        )
