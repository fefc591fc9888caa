"""The compiled CPU kernels (`rotaryquant._native`) as the ops' `cpu.py` files use them.

The native module reads tensors where they lie and checks every range against their shapes before it touches memory;
nothing here copies a tensor that it can read. Whoever calls keeps the tensors alive.
"""

import ctypes
import importlib
import operator
import weakref
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rotaryquant import env
from rotaryquant.errors import ConfigError
from rotaryquant.formats.rotation import hadamard_factors, paley_base
from rotaryquant.ops.rotate import Rotation
from rotaryquant.ops.streams import SCALE_DTYPES, CacheView, Codec, PackedStream
from rotaryquant.ops.weights import PackedWeight

if TYPE_CHECKING:
    from rotaryquant.ops.packed_attention import Options

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: Widest row the native kernels have buffers for.
MAX_WIDTH = 1024

_SCALE_NAMES = {dtype: name for name, dtype in SCALE_DTYPES.items()}

#: Rotations and codecs whose native descriptions are kept; more than the streams of any model so far.
_KEPT = 512


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The native module, or the reason it cannot be imported. Raises ConfigError where RQ_CPU_ISA names nothing."""
    try:
        loaded = importlib.import_module("rotaryquant._native")
    except ImportError as error:
        return None, (
            f"rotaryquant._native cannot be imported ({error}); reinstall the package on a machine "
            f"with a C++17 compiler (GCC or Clang): pip install --force-reinstall --no-deps rotaryquant"
        )
    wanted, available = env.cpu_isa(), loaded.instruction_sets()
    if wanted is not None and wanted not in available:
        raise ConfigError(
            f"RQ_CPU_ISA={wanted!r} is not among the instruction sets that this build and this processor have: "
            f"{', '.join(available)}; name one of them, or unset it for the first"
        )
    loaded.use_instruction_set(wanted or available[0])
    loaded.read_tensors(torch.Tensor)
    loaded.borrow_threads(_parallel_of_torch() or 0)
    return loaded, None


def _parallel_of_torch() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that this process has loaded with torch, or None.

    Its threads stay awake for a while after each of torch's own loops: threads of ours would wait for a processor.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return None
    names = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libgomp" in line}
    if len(names) != 1:  # with two runtimes there is no telling which one torch uses
        return None
    try:
        parallel = ctypes.CDLL(names.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(parallel, ctypes.c_void_p).value


def missing() -> str | None:
    """Why no native kernel can run here, or None."""
    return _load()[1]


def module() -> Any:
    """The native module. Raises ImportError where it is missing."""
    loaded, reason = _load()
    if loaded is None:
        raise ImportError(reason)
    return loaded


def instruction_sets() -> list[str]:
    """Instruction sets that this build and this processor have, best first; empty without the native module."""
    return list(module().instruction_sets()) if missing() is None else []


def instruction_set() -> str | None:
    """The instruction set in use, or None without the native module."""
    return str(module().instruction_set()) if missing() is None else None


def not_on_cpu(**tensors: Tensor | None) -> str | None:
    """The first of the named tensors that does not live in this process' memory, as a reason, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_cpu:
            return f"{name} is on {tensor.device}, this kernel reads CPU memory"
    return None


def bits_reason(bits: int, width: int) -> str | None:
    """Why rows of this kind have no native code path, or None."""
    if bits == 32:
        return "bits=32 (the lossless test codec) has no native kernel"
    return width_reason(width)


def width_reason(width: int) -> str | None:
    """Why rows of this width have no native code path, or None."""
    if width % 8 or not 8 <= width <= MAX_WIDTH:
        return f"width={width}: this kernel takes multiples of 8 up to {MAX_WIDTH}"
    return None


@cache
def _paley(order: int) -> Tensor:
    return torch.from_numpy(paley_base(order)).float().contiguous()


@lru_cache(maxsize=_KEPT)
def rotation(item: Rotation) -> Any:
    """The native description of a rotation, which copies its tables; made once per rotation object."""
    power, base = hadamard_factors(item.width) if item.hadamard else (0, 1)
    factors = {
        name: None if factor is None else factor.float().contiguous()
        for name, factor in (("signs", item.signs), ("blocks", item.blocks), ("matrix", item.matrix))
    }
    return module().Rotation(
        width=item.width,
        heads=item.num_kv_heads,
        power=power,
        base=_paley(base),
        **factors,
    )


@lru_cache(maxsize=_KEPT)
def codec(item: Codec) -> Any:
    """The native description of a codec, which copies its tables; made once per codec object."""
    return module().codec(
        layout=item.layout,
        width=item.width,
        bits=item.bits,
        rule=item.scale_rule,
        group=item.scale_group,
        scale_dtype=_SCALE_NAMES[item.scale_dtype],
        unit=item.unit,
        trellis=item.trellis,
        levels=item.levels,
        boundaries=item.boundaries,
    )


def stream(item: PackedStream) -> Any:
    """The native description of packed rows in slabs, which `stream_reason` has found to be alike."""
    return _described(item)[2]


#: Slabs, the reason against native code, and else the native description of living streams, by their id.
_streams: dict[int, tuple[list[Tensor], str | None, Any]] = {}


def _described(item: PackedStream) -> tuple[list[Tensor], str | None, Any]:
    """What is known of a stream; found anew when a slab was added or replaced."""
    known = _streams.get(id(item))
    slabs = item.codes + item.scales
    if known is not None and len(known[0]) == len(slabs) and all(map(operator.is_, known[0], slabs)):
        return known
    if known is None:
        weakref.finalize(item, _streams.pop, id(item), None)
    reason = _stream_reason(item)
    known = (slabs, reason, _describe(item) if reason is None else None)
    _streams[id(item)] = known
    return known


def _describe(item: PackedStream) -> Any:
    return module().Stream(
        codec=codec(item.codec),
        blocks_per_slab=item.blocks_per_slab,
        codes=item.codes,
        scales=item.scales,
    )


#: Where the codes and scales of living packed weights lie, and their native descriptions, by the weights' id.
_weights: dict[int, tuple[tuple[int, int, torch.dtype], Any]] = {}


def weight(item: PackedWeight) -> Any:
    """The native description of a packed matrix or a stack of them, made anew where its tensors were moved."""
    codes, scales = item.codes, item.scales
    place = codes.data_ptr(), scales.data_ptr(), scales.dtype
    known = _weights.get(id(item))
    if known is not None and known[0] == place:
        return known[1]
    if known is None:
        weakref.finalize(item, _weights.pop, id(item), None)
    form, tables = item.codec.format, item.codec
    described = module().Weight(
        codes=codes,
        scales=scales,
        levels=tables.small_levels,
        factors=tables.input_factors,
        rotated=form.rotated,
        bits=form.bits,
        group=form.group,
    )
    _weights[id(item)] = place, described
    return described


@dataclass(slots=True)
class _KnownView:
    """A view's reason against native code, or else its native description with the tensor that it needs beside the
    view's, and the newest options with which it was used.
    """

    reason: str | None
    made: Any = None
    means: Tensor | None = None
    options: "Options | None" = None
    sink_logits: Tensor | None = None
    plan: Any = None


#: Living views by their id.
_views: dict[int, _KnownView] = {}


def _described_view(item: CacheView) -> _KnownView:
    known = _views.get(id(item))
    if known is None:
        reason = _view_reason(item)
        known = _KnownView(reason) if reason is not None else _describe_view(item)
        weakref.finalize(item, _views.pop, id(item), None)
        _views[id(item)] = known
    return known


def _describe_view(item: CacheView) -> _KnownView:
    means = None if item.means is None else item.means.float().contiguous()
    made = module().View(
        keys=stream(item.keys),
        values=stream(item.values),
        key_rotation=rotation(item.key_rotation),
        value_rotation=rotation(item.value_rotation),
        block_table=item.block_table,
        packed_lens=item.packed_lens,
        seq_lens=item.seq_lens,
        num_sinks=item.num_sinks,
        means=means,
        dense_keys=item.dense_keys,
        dense_values=item.dense_values,
        dense_positions=item.dense_positions,
    )
    return _KnownView(None, made, means)


def plan(item: CacheView, options: "Options") -> Any:
    """What attention on a layer's cache needs besides queries, where `view_reason` finds nothing; kept while it is
    asked for with the same options.
    """
    known = _described_view(item)
    if known.options is None or not known.options.same_as(options):
        sink_logits = None if options.sink_logits is None else options.sink_logits.float().contiguous()
        codec, noise = item.keys.codec, options.key_noise
        known.plan = module().Plan(
            view=known.made,
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            softcap=options.softcap,
            noise_query=noise / (2 * codec.unit**2) if noise else 0.0,
            noise_score=noise / (2 * codec.width) if noise else 0.0,
            sink_logits=sink_logits,
            inverse=options.inverse,
        )
        known.options, known.sink_logits = options, sink_logits
    return known.plan


def view_reason(item: CacheView) -> str | None:
    """Why a cache laid out like this has no native code path, or None."""
    return _described_view(item).reason


def _view_reason(item: CacheView) -> str | None:
    reason = stream_reason("keys", item.keys) or stream_reason("values", item.values)
    reason = reason or rotation_reason(item.key_rotation) or rotation_reason(item.value_rotation)
    numbers = {
        "block_table": item.block_table,
        "packed_lens": item.packed_lens,
        "seq_lens": item.seq_lens,
        "dense_positions": item.dense_positions,
    }
    reason = reason or not_on_cpu(means=item.means, **numbers)
    for name, tensor in numbers.items():
        if reason is None and tensor is not None and not tensor.is_contiguous():
            reason = f"{name} is not contiguous"
    if reason is None and item.dense_keys is not None and item.dense_values is not None:
        reason = rows_reason("dense_keys", item.dense_keys) or rows_reason("dense_values", item.dense_values)
    return reason


def codec_reason(item: Codec) -> str | None:
    """Why rows of this codec have no native code path, or None."""
    return not_on_cpu(levels=item.levels, boundaries=item.boundaries) or bits_reason(item.bits, item.width)


def stream_reason(name: str, item: PackedStream) -> str | None:
    """Why packed rows laid out like these have no native code path, or None."""
    reason = _described(item)[1]
    return None if reason is None else f"{name}: {reason}"


def _stream_reason(item: PackedStream) -> str | None:
    if reason := codec_reason(item.codec):
        return reason
    for slabs in (item.codes, item.scales):
        for slab in slabs:
            if not slab.is_cpu:
                return f"a slab is on {slab.device}, this kernel reads CPU memory"
            if slab.shape != slabs[0].shape or slab.stride() != slabs[0].stride() or slab.dtype != slabs[0].dtype:
                return "slabs of different shapes, strides or dtypes"
    if item.codes and item.codes[0].stride(-1) != 1:
        return "code rows whose bytes are not adjacent"
    if item.codes and item.codes[0].stride(-2) != item.codec.code_bytes:
        return "code rows that are not adjacent"
    return None


@lru_cache(maxsize=_KEPT)
def rotation_reason(item: Rotation) -> str | None:
    """Why this rotation has no native code path, or None."""
    if reason := not_on_cpu(signs=item.signs, blocks=item.blocks, matrix=item.matrix):
        return reason
    return width_reason(item.width)


def rows_reason(name: str, x: Tensor) -> str | None:
    """Why rows like these cannot be read where they lie, or None."""
    if not x.is_cpu:
        return not_on_cpu(**{name: x})
    if x.dtype not in FLOATS:
        return f"{name} is {x.dtype}; this kernel reads float32, bfloat16 and float16"
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return f"{name} has a last dimension that is not contiguous"
    return None
