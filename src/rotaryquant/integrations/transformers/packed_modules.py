"""Modules with packed weights, in the place of a model's own: linear layers, embeddings, experts.

Each has the parameters of the one it replaces under the same names, as codes, and beside each the scales, `NAME_scale`,
and where its inputs have factors these, `NAME_inputs`; experts share those of what all of them get, `up_inputs`.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.models.roles import INPUTS, SCALE, UP_INPUTS
from rotaryquant.ops.dequant_matmul import dequant_matmul, dequantize
from rotaryquant.ops.expert_matmul import Gate, expert_matmul
from rotaryquant.ops.weights import PackedWeight, WeightCodec, rotate_inputs


@lru_cache(maxsize=256)
def _codec(form: WeightFormat, device: torch.device) -> WeightCodec:
    return WeightCodec.from_format(form, device)


class PackedModule(nn.Module):
    """What packed modules share: adding a packed parameter, and reading it."""

    def __init__(self, dtype: torch.dtype, factors: bool) -> None:
        super().__init__()
        self._factors = factors
        self._forms: dict[str, WeightFormat] = {}
        self._known: dict[str, PackedWeight] = {}  # as they were last read
        # a model takes the dtype of its first parameter that has one; in 16 bits scales keep their range
        self._scale_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16

    def _add(self, name: str, shape: tuple[int, ...], form: WeightFormat) -> None:
        """A parameter of that shape, the last dimension its width, as codes and scales."""
        self._forms[name] = form
        codes = torch.empty(*shape[:-1], form.code_bytes, dtype=torch.uint8)
        scales = torch.empty(*shape[:-1], form.groups, dtype=self._scale_dtype)
        self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
        self.register_parameter(name + SCALE, nn.Parameter(scales, requires_grad=False))
        if self._factors and (inputs := self._inputs_of(name)) not in self._parameters:
            own = shape[-1:] if inputs == UP_INPUTS[1:] else (*shape[:-2], shape[-1])
            self.register_parameter(
                inputs, nn.Parameter(torch.empty(own, dtype=self._scale_dtype), requires_grad=False)
            )

    def _inputs_of(self, name: str) -> str:
        """The name of a parameter's factors."""
        return name + INPUTS

    def factors(self, name: str) -> Tensor | None:
        """Of a parameter's inputs, [width], of a stack with inputs of their own [matrices, width]; None for none."""
        return self._parameters[self._inputs_of(name)] if self._factors else None

    def multiplied(self, name: str, x: Tensor, matrix: int | None = None) -> Tensor:
        """Inputs [..., width] times their factors, fp32; as they are where there are none. matrix: which of a stack."""
        factors = self.factors(name)
        if factors is None:
            return x
        return x.float() * (factors if matrix is None else factors[matrix]).float()

    def unpacked(self, name: str = "weight") -> Tensor:
        """The weights that a parameter stands for, fp32 [..., rows, width], for inputs as they are."""
        found, factors = rotate_inputs(dequantize(self.packed(name)), self.form(name), inverse=True), self.factors(name)
        return found if factors is None else found * (factors if factors.dim() == 1 else factors[:, None]).float()

    def packed(self, name: str) -> PackedWeight:
        """A parameter as the ops read it."""
        codes, scales = self._parameters[name], self._parameters[name + SCALE]
        assert codes is not None
        assert scales is not None
        known = self._known.get(name)
        if known is None or known.codes is not codes or known.scales is not scales or known.device != codes.device:
            known = self._known[name] = PackedWeight(_codec(self._forms[name], codes.device), codes, scales)
        return known

    def has(self, name: str) -> bool:
        """Whether a parameter of that name is packed."""
        return name in self._forms

    def form(self, name: str) -> WeightFormat:
        """How a parameter is stored."""
        return self._forms[name]

    def extra_repr(self) -> str:
        """Shapes and bits."""
        return ", ".join(f"{name}: {form.width} at {form.bits} bits, {form.grid}" for name, form in self._forms.items())


class PackedLinear(PackedModule):
    """In the place of `nn.Linear`."""

    def __init__(self, source: nn.Linear, form: WeightFormat, dtype: torch.dtype, factors: bool = False) -> None:
        super().__init__(dtype, factors)
        self.in_features, self.out_features = source.in_features, source.out_features
        self._add("weight", (source.out_features, source.in_features), form)
        self.bias: nn.Parameter | None = None
        if "bias" in dict(source.named_parameters()):
            self.bias = nn.Parameter(torch.empty_like(source.bias), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [..., in_features] to [..., out_features], in x's dtype."""
        y = dequant_matmul(self.multiplied("weight", x), self.packed("weight")).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class PackedEmbedding(PackedModule):
    """In the place of `nn.Embedding`, of Gemma's too, which multiplies its rows by a factor."""

    def __init__(self, source: nn.Embedding, form: WeightFormat, dtype: torch.dtype, factors: bool = False) -> None:
        super().__init__(dtype, factors)
        scaled = getattr(source, "scalar_embed_scale", None)
        if type(source) is not nn.Embedding and scaled is None:
            raise UnsupportedModelError(f"an embedding of class {type(source).__name__} has no packed form here")
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.padding_idx, self.factor, self.dtype = source.padding_idx, scaled, dtype
        self._add("weight", (source.num_embeddings, source.embedding_dim), form)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., embedding_dim] of ids, in the model's dtype; only these are read."""
        whole, form = self.packed("weight"), self.form("weight")
        rows = PackedWeight(whole.codec, whole.codes[ids], whole.scales[ids])
        found = self.multiplied("weight", rotate_inputs(dequantize(rows), form, inverse=True)).to(self.dtype)
        # as the module that this one replaces: the factor in the dtype of the rows
        return found if self.factor is None else found * torch.tensor(self.factor, dtype=self.dtype, device=ids.device)


def _no_gate(*_: Tensor) -> Tensor:
    raise UnsupportedModelError("these experts are gated, but their class does not say how")


class PackedExperts(PackedModule):
    """In the place of a module of routed experts, gated or not. Only the experts that tokens go to are read."""

    _IN, _OUT = ("gate_up_proj", "up_proj"), "down_proj"

    def __init__(
        self, source: nn.Module, forms: dict[str, WeightFormat], dtype: torch.dtype, factors: bool = False
    ) -> None:
        super().__init__(dtype, factors)
        self._gate: Callable[..., Tensor] = getattr(type(source), "_apply_gate", _no_gate)
        given = vars(source) | dict(source.named_children())
        self.num_experts: int = given["num_experts"]
        self.act_fn: Callable[[Tensor], Tensor] = given["act_fn"]
        self.has_gate: bool = getattr(source, "has_gate", True) is True
        if getattr(source, "is_transposed", False) or getattr(source, "has_bias", False):
            raise UnsupportedModelError(
                f"experts of class {type(source).__name__} are stored transposed or have biases, which packed ones "
                f"have not; leave routed experts as they are"
            )
        for name, parameter in source.named_parameters(recurse=False):
            self._add(name, tuple(parameter.shape), forms[name])
        self._first = next(name for name in self._IN if name in forms)
        self._between = Gate(self._gated, self._fused() if self.has_gate else None)

    def _gated(self, up: Tensor) -> Tensor:
        """What the second product takes of what the first one gives."""
        return self._gate(self, up) if self.has_gate else self.act_fn(up)

    def _fused(self) -> str | None:
        """The name of the activation, where the class gates as most do: activation(first half) · second half."""
        if self._gate is not _default_apply_gate:
            return None
        if isinstance(self.act_fn, nn.SiLU | SiLUActivation):
            return "silu"
        tanh = isinstance(self.act_fn, GELUTanh) or getattr(self.act_fn, "approximate", None) == "tanh"
        return "gelu_tanh" if tanh else None

    def _inputs_of(self, name: str) -> str:
        return super()._inputs_of(name) if name == self._OUT else UP_INPUTS[1:]

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [tokens, hidden], their experts [tokens, k] and weights, to [tokens, hidden]."""
        if self.factors(self._OUT) is not None:
            return self._one_by_one(hidden, top_k_index, top_k_weights)
        first, second = self.packed(self._first), self.packed(self._OUT)
        return expert_matmul(hidden, top_k_index, top_k_weights, first, second, self._between)

    def _one_by_one(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The same where inputs of each expert's second product have factors of their own."""
        out = torch.zeros_like(hidden, dtype=torch.float32)
        inputs = self.multiplied(self._first, hidden)
        first, second = self.packed(self._first), self.packed(self._OUT)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:  # a sentinel: the expert is elsewhere
                continue
            token, place = torch.where(top_k_index == expert)
            inner = self._gated(dequant_matmul(inputs[token], first[expert]).to(hidden.dtype))
            down = dequant_matmul(self.multiplied(self._OUT, inner, expert), second[expert])
            out.index_add_(0, token, down.float() * top_k_weights[token, place, None].float())
        return out.to(hidden.dtype)
