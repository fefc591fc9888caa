"""What a model's matrices are multiplied with: the second moment of their inputs, heard while it reads a text.

A few layers are listened to at a time, since the moments of a layer's experts can be larger than its weights; the text
is read once for each such stretch. A linear layer is heard by a hook. Experts are not modules of their own: while a
stretch is heard, the module that holds them runs expert by expert, and notes what each of them gets.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from rotaryquant.errors import ConfigError, UnsupportedModelError
from rotaryquant.models.roles import UP_INPUTS, Role, expert_matrix, layer_number

#: Bytes of moments that are held at a time, at least those of one layer.
_HELD_BYTES = 2_000_000_000

#: Tokens that an expert must have got for its own moment to be used; below, that of all tokens at its layer.
LEAST_TOKENS = 128

#: Added to the number of an expert: inputs of its second matrix. One below: of all experts.
_DOWN = 1 << 20
_LAYER = re.compile(r".*?\b(?:layers|blocks|h)\.(?P<number>\d+)\.(?P<tail>.+)")


@dataclass
class _Moment:
    """Sum of x·xᵀ over tokens, and how many."""

    sums: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """More inputs, [..., width]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.sums.addmm_(rows.T, rows)
        self.tokens += len(rows)

    def mean(self) -> Tensor:
        """Second moment of an input."""
        return self.sums / max(self.tokens, 1)


class InputMoments:
    """Moments of the inputs of a checkpoint's matrices, by the matrices' names in the file.

    model: the checkpoint, loaded. windows: ids [tokens] of what it reads. names: of the file's matrices, with roles.
    starved: experts whose own moment was not used, with the tokens that they got. heard: inputs of each matrix, of a
    stack by the expert that got the fewest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Sequence[Tensor],
        names: dict[str, Role],
        progress: Callable[[str, float | None], None],
    ) -> None:
        if not windows:
            raise ConfigError("calibration: the text is too short for a single window; give more of it")
        self._model, self._windows, self._progress = model, windows, progress
        self._modules = {_tail(name): name for name, module in model.named_modules() if _heard(name, module)}
        self._layers = sorted({layer for name in names if (layer := layer_number(name)) is not None})
        self._tied = bool(model.config.tie_word_embeddings)
        self._names = names
        self._held: dict[tuple[str, int], _Moment] = {}
        self._stretch: list[int | None] = []
        self.starved: dict[str, int] = {}
        self.heard: dict[str, int] = {}

    def __call__(self, name: str) -> Tensor | None:
        """fp32 [width, width], for a stack [experts, width, width]; None for an embedding, whose rows are looked up.

        name: of a matrix, or of the factors of what all experts of a layer get (`UP_INPUTS`): that of all its tokens.
        Raises ConfigError where nothing was heard of a matrix that inputs must come to.
        """
        role = Role.ROUTED_EXPERT if name.endswith(UP_INPUTS) else self._names[name]
        layer = layer_number(name)
        if role is Role.EMBEDDING and not self._tied:
            return None
        if layer not in self._stretch:
            self._listen(layer)
        if role in (Role.EMBEDDING, Role.HEAD):
            return self._checked(name, self._held.get(("", -1))).mean()
        if role is Role.ROUTED_EXPERT:
            return self._of_experts(name)
        tail = _tail(name.removesuffix(".weight"))
        if role is Role.PER_LAYER_INPUT and tail not in self._modules:
            return None  # a table of the vocabulary, whose rows are looked up
        return self._checked(name, self._held.get((self._module_of(tail), -1))).mean()

    def _module_of(self, tail: str) -> str:
        if tail not in self._modules:
            raise ConfigError(f"calibration: no module of the model is {tail!r}, so that its inputs cannot be heard")
        found: str = self._modules[tail]
        return found

    def _checked(self, name: str, heard: _Moment | None) -> _Moment:
        if heard is None or heard.tokens == 0:
            raise ConfigError(f"calibration: no input of {name!r} was heard; its rounding would rest on nothing")
        self.heard[name] = heard.tokens
        return heard

    def _of_experts(self, name: str) -> Tensor:
        """Of one expert's matrix, of a stack of all, or of all tokens at the layer."""
        found = expert_matrix(name)
        module, number = self._module_of(_tail(found.module)), found.number
        experts: Any = self._model.get_submodule(module)
        wanted = range(experts.num_experts) if number is None else [number]
        base = _DOWN if found.down else 0
        shared = self._checked(name, self._held.get((module, base - 1))).mean()
        if name.endswith(UP_INPUTS):
            return shared
        moments = [self._of_expert(module, base, expert, shared) for expert in wanted]
        self.heard[name] = min(self._tokens(module, base, expert) for expert in wanted)
        return torch.stack(moments) if number is None else moments[0]

    def _tokens(self, module: str, base: int, expert: int) -> int:
        """Inputs that an expert got."""
        own = self._held.get((module, base + expert))
        return own.tokens if own is not None else 0

    def _of_expert(self, module: str, base: int, expert: int, shared: Tensor) -> Tensor:
        """An expert's own moment, or that of all tokens at its layer where it got too few."""
        tokens = self._tokens(module, base, expert)
        if tokens >= LEAST_TOKENS:
            return self._held[module, base + expert].mean()
        self.starved[f"{module}.{expert}"] = tokens
        return shared

    def _listen(self, layer: int | None) -> None:
        """Hear a stretch of layers that begins with this one, or what stands behind all of them."""
        self._held.clear()
        self._stretch = [None] if layer is None else self._next_stretch(layer)
        numbers = [number for number in self._stretch if number is not None]
        what = f"layers {numbers[0]} to {numbers[-1]}" if numbers else "the head"
        with torch.inference_mode(), self._listening():
            for number, ids in enumerate(self._windows):
                out = self._model.base_model(ids[None], use_cache=False)
                if layer is None:
                    self._note("", -1, out.last_hidden_state)
                self._progress(f"inputs of {what}: window {number + 1} of {len(self._windows)}", None)

    def _next_stretch(self, layer: int) -> list[int | None]:
        """As many layers as fit, at least one."""
        chosen: list[int | None] = []
        size = 0
        for number in (one for one in self._layers if one >= layer):
            size += self._bytes_of(number)
            if chosen and size > _HELD_BYTES:
                break
            chosen.append(number)
        return chosen

    def _bytes_of(self, layer: int) -> int:
        """Of the moments of a layer's matrices."""
        total = 0
        for tail, name in self._modules.items():
            if layer_number(f"{name}.weight") != layer:
                continue
            module: Any = self._model.get_submodule(name)
            if tail.endswith("experts"):
                widths = [parameter.shape[-1] for parameter in module.parameters(recurse=False)]
                total += 4 * (module.num_experts + 1) * sum(width**2 for width in widths)
            else:
                total += 4 * module.in_features**2
        return total

    def _note(self, module: str, expert: int, x: Tensor) -> None:
        key = module, expert
        if key not in self._held:
            self._held[key] = _Moment(torch.zeros(x.shape[-1], x.shape[-1], device=x.device))
        self._held[key].add(x)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hooks on the stretch's linear layers, and experts that note what they get."""
        hooks: list[RemovableHandle] = []
        replaced: list[nn.Module] = []
        for name in self._modules.values():
            if layer_number(f"{name}.weight") not in self._stretch:
                continue
            module = self._model.get_submodule(name)
            if isinstance(module, nn.Linear):
                hooks.append(module.register_forward_pre_hook(partial(self._note_input, name)))
            else:
                module.forward = partial(_noting_forward, module, partial(self._note, name))
                replaced.append(module)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in replaced:
                del module.forward

    def _note_input(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._note(name, -1, inputs[0])


def _tail(name: str) -> str:
    """A module's name from its layer on, which file and model agree in."""
    within = _LAYER.fullmatch(name)
    return f"{within['number']}.{within['tail']}" if within else name.rpartition(".")[2]


def _heard(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (name.endswith("experts") and hasattr(module, "num_experts"))


def _noting_forward(
    experts: Any, note: Callable[[int, Tensor], None], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """What a module of experts computes, expert by expert. note: told of an expert (-1: all) and its inputs."""
    if experts.is_transposed or experts.has_bias:
        raise UnsupportedModelError(
            f"experts of class {type(experts).__name__} cannot be heard: transposed, or with biases"
        )
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    out = torch.zeros_like(hidden, dtype=torch.float32)
    note(-1, hidden)
    for expert in torch.unique(index).tolist():
        token, place = torch.where(index == expert)
        note(expert, hidden[token])
        inner = functional.linear(hidden[token], first[expert])
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        note(_DOWN + expert, inner)
        note(_DOWN - 1, inner)
        found = functional.linear(inner, experts.down_proj[expert])
        out.index_add_(0, token, (found * weights[token, place, None]).float())
    return out.to(hidden.dtype)
