"""`rotaryquant inspect`: what a model's tensors are for, its layers, and what their KV cache takes, from headers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.cli.sizes import show_bytes
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.integrations.transformers.geometry import LayerGeometry
    from rotaryquant.kv.footprint import Footprint
    from rotaryquant.weights.headers import TensorInfo

_LENGTHS = (1_024, 4_096, 16_384, 32_768, 131_072)


@dataclass(frozen=True)
class _Headers:
    """What the files say. config: of transformers. sizes: elements and bytes of each tensor by name. tensors: of a
    folder, none of a GGUF file.
    """

    config: Any
    sizes: dict[str, tuple[int, int]]
    dtypes: list[str]
    tensors: "list[TensorInfo]"

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(elements for elements, _ in self.sizes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes for _, nbytes in self.sizes.values())


@dataclass(frozen=True)
class _RoleRow:
    """Tensors of one role. kurtosis: excess, of those that are matrices, or None where it was not asked for."""

    role: str
    tensors: int
    parameters: int
    nbytes: int
    kurtosis: float | None


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = common.parser(
        "inspect",
        "What a model's tensors are for, its layers, and what their KV cache takes. Reads headers alone; a model "
        "that is only on the hub is downloaded first.",
    )
    common.add_model(made, required=True)
    made.add_argument(
        "--kurtosis", action="store_true", help="read the weights too: how heavy their tails are, by role"
    )
    args = made.parse_args(words)
    from rotaryquant.config import parse_kv
    from rotaryquant.integrations.sources import find_source
    from rotaryquant.integrations.transformers.checkpoints import model_folder
    from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
    from rotaryquant.kv.footprint import Footprint

    kv = parse_kv(args.kv)
    source = find_source(args.model)
    headers = _read(model_folder(args.model) if isinstance(source, str) else source)
    roles = _by_role(headers, args.kurtosis)
    config = text_config(headers.config)
    footprint = Footprint(read_geometry(config), kv)
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    lengths = [length for length in _LENGTHS if length < limit] + [limit] if limit else list(_LENGTHS)
    contexts = [(tokens, footprint.exact_bytes(tokens), footprint.stored_bytes(tokens)) for tokens in lengths]
    if args.json:
        print_json(_as_json(args, headers, roles, config.model_type, footprint, limit, contexts))
        return 0
    _print(args, headers, roles, config.model_type, footprint, limit, contexts)
    return 0


def _read(source: Path) -> _Headers:
    """Headers of a folder or a GGUF file."""
    from rotaryquant.integrations.transformers.checkpoints import read_config
    from rotaryquant.integrations.transformers.gguf import check_gguf, gguf_config
    from rotaryquant.integrations.transformers.quiet import quiet
    from rotaryquant.weights.headers import read_folder
    from rotaryquant.weights.packed_config import config_in, weights_of

    with quiet():
        if source.is_dir():
            tensors = read_folder(source)
            dtypes = sorted({tensor.dtype for tensor in tensors})
            config = read_config(source)
            sizes = weights_of(tensors, config_in(source))
        else:
            tensors, header = [], check_gguf(source)
            dtypes = ["GGUF"]
            sizes = {tensor.name: (tensor.elements, tensor.nbytes) for tensor in header.tensors}
            config = gguf_config(source)
    return _Headers(config, sizes, dtypes, tensors)


def _by_role(headers: _Headers, kurtosis: bool) -> list[_RoleRow]:
    """Rows of what the tensors are for. Raises UnsupportedModelError for a tensor of which nobody knows."""
    from rotaryquant.models.roles import Role, grouped, roles_of

    roles = roles_of(headers.sizes)
    tails: dict[Role, float] = {}
    if kurtosis:
        from rotaryquant.weights.kurtosis import kurtosis_by_role

        if not headers.tensors:
            raise ConfigError("--kurtosis reads safetensors; a GGUF file is quantised already")
        with Waiting() as waiting:
            tails = kurtosis_by_role(headers.tensors, roles, waiting)
    return [
        _RoleRow(
            role.value,
            len(names),
            sum(headers.sizes[name][0] for name in names),
            sum(headers.sizes[name][1] for name in names),
            tails.get(role),
        )
        for role, names in grouped(roles).items()
    ]


def _groups(layers: Sequence["LayerGeometry"]) -> list[tuple[str, str, str, str, str, str]]:
    """Layers alike in one row: numbers, type, heads, KV heads, width, how they are kept."""
    alike: dict[tuple[str, int, int, int, bool, int], list[int]] = {}
    for layer in layers:
        key = (layer.layer_type, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.packable, layer.window)
        alike.setdefault(key, []).append(layer.index)
    found = []
    for (kind, heads, kv_heads, width, packable, window), numbers in alike.items():
        kept = "packable" if packable else f"16-bit, window {window}" if window else "no growing cache"
        found.append((_ranges(numbers), kind.removesuffix("_attention"), str(heads), str(kv_heads), str(width), kept))
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """0-4, 6, 8-9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _print(
    args: Any,
    headers: _Headers,
    roles: list[_RoleRow],
    family: str,
    footprint: "Footprint[LayerGeometry]",
    limit: int,
    contexts: list[tuple[int, int, int]],
) -> None:
    name = footprint.kv.name if footprint.kv is not None else "fp16"
    packable = sum(layer.packable for layer in footprint.layers)
    print_table(
        [
            ("model", args.model),
            ("family", family),
            ("parameters", f"{headers.parameters:,} in {show_bytes(headers.nbytes)} ({', '.join(headers.dtypes)})"),
            ("layers", f"{len(footprint.layers)}, {packable} of them packable"),
            ("context", f"{limit:,} tokens" if limit else "no limit stated"),
            ("KV bytes per token", _per_token(footprint)),
        ]
    )
    print()
    shares = [(f"{row.nbytes / headers.nbytes:.1%}", f"{8 * row.nbytes / row.parameters:.2f}") for row in roles]
    tails = [() if row.kurtosis is None and not args.kurtosis else (_signed(row.kurtosis),) for row in roles]
    print_table(
        [
            (row.role, f"{row.tensors:,}", f"{row.parameters:,}", show_bytes(row.nbytes), *share, *tail)
            for row, share, tail in zip(roles, shares, tails, strict=True)
        ],
        ("role", "tensors", "parameters", "bytes", "share", "bits each", *(("kurtosis",) if args.kurtosis else ())),
        right=(1, 2, 3, 4, 5, 6),
    )
    print()
    print_table(_groups(footprint.layers), ("layers", "type", "heads", "KV heads", "width", "cache"), right=(2, 3, 4))
    print()
    print_table(
        [
            (f"{tokens:,}", show_bytes(exact), show_bytes(stored), f"{exact / stored:.2f}x" if stored else "-")
            for tokens, exact, stored in contexts
        ],
        ("context", "16-bit", f"kv={name}", "smaller"),
        right=(0, 1, 2, 3),
    )


def _signed(kurtosis: float | None) -> str:
    return "-" if kurtosis is None else f"{kurtosis:+.2f}"


def _per_token(footprint: "Footprint[LayerGeometry]") -> str:
    packed = f", {footprint.packed_per_token():,} once packed" if footprint.kv is not None else ""
    return f"{footprint.exact_per_token():,} at 16 bits{packed} (full-attention layers)"


def _as_json(
    args: Any,
    headers: _Headers,
    roles: list[_RoleRow],
    family: str,
    footprint: "Footprint[LayerGeometry]",
    limit: int,
    contexts: list[tuple[int, int, int]],
) -> dict[str, Any]:
    return {
        "model": args.model,
        "family": family,
        "parameters": headers.parameters,
        "weight_bytes": headers.nbytes,
        "dtypes": headers.dtypes,
        "roles": [asdict(row) for row in roles],
        "max_context": limit or None,
        "layer_types": dict(Counter(layer.layer_type for layer in footprint.layers)),
        "layers": [
            {
                "index": layer.index,
                "type": layer.layer_type,
                "packable": layer.packable,
                "num_heads": layer.num_heads,
                "num_kv_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "window": layer.window or None,
            }
            for layer in footprint.layers
        ],
        "kv": footprint.kv.name if footprint.kv is not None else "fp16",
        "kv_bytes_per_token_16bit": footprint.exact_per_token(),
        "kv_bytes_per_token_packed": footprint.packed_per_token() or None,
        "contexts": [
            {"tokens": tokens, "bytes_16bit": exact, "bytes_stored": stored} for tokens, exact, stored in contexts
        ],
    }
