"""What each tensor of a checkpoint is for, told by its name, and by what else its layer holds.

A name is matched as a whole against the patterns of `_IN_LAYER` (what follows `layers.N.`) or `_OUTSIDE` (the whole
name without the model's own prefix). Nothing is told by shape, and nothing is guessed: a name that no pattern knows is
refused, since a router or a gate that is taken for a weight like others costs a model its mind.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Self

from rotaryquant.errors import UnsupportedModelError


class Role(StrEnum):
    """What a tensor is for, in the order in which tables name them."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    LATENT_ATTENTION = "latent attention"  #: projections into and out of the latent of MLA
    STATE_SPACE = "state space"  #: projections of Mamba and linear attention
    DENSE_MLP = "dense MLP"
    SHARED_EXPERT = "shared expert"  #: and any MLP that runs beside routed experts in every token
    ROUTED_EXPERT = "routed expert"
    LATENT_PROJECTION = "latent projection"  #: in front of and behind experts that work in fewer dimensions
    PER_LAYER_INPUT = "per-layer input"
    ROUTER = "router"
    SHARED_GATE = "shared gate"
    STATE = "state"  #: what steers a recurrent state: decays, steps, short convolutions
    NORM = "norm"
    BIAS = "bias"
    OTHER_INPUT = "other input"  #: vision and audio towers and their projections


class Side(StrEnum):
    """Where in its block a matrix stands: errors in those that write into the residual stream, and in values, which
    attention passes on as they are, cost more than in those in front of them.
    """

    IN = ""
    VALUE = "value"
    OUT = "out"


class Part(NamedTuple):
    """A role and a side: the finest thing that is given bits of its own in a layer. As text: `routed expert out`."""

    role: Role
    side: Side

    def __str__(self) -> str:
        return f"{self.role} {self.side}".strip()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError for a text that is no part."""
        for side in (Side.VALUE, Side.OUT):
            if text.endswith(f" {side}"):
                return cls(Role(text.removesuffix(f" {side}")), side)
        return cls(Role(text), Side.IN)


#: Behind the name of a packed tensor, the names of its scales and of its inputs' factors: they are of its role.
SCALE, INPUTS = "_scale", "_inputs"

#: Behind the name of a module of experts, the name of the factors of what all of them get as inputs.
UP_INPUTS = ".up_inputs"

#: Names of a routed expert's second matrix, or of a stack of these.
_DOWN = ("down_proj", "w2", "output_linear")

#: Roles whose tensors stay as they are whatever the recipe: small, and errors in them change which experts run, how
#: long a state lives, or everything behind them.
KEPT = frozenset({Role.ROUTER, Role.SHARED_GATE, Role.STATE, Role.NORM, Role.BIAS, Role.OTHER_INPUT})

_MLP = r"(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123]|fc[12]|input_linear|output_linear)"
#: Where a layer keeps its MLP, dense or routed.
_BLOCK = r"(?:mlp|mixer|block_sparse_moe|feed_forward|ffn|moe)"

#: By what follows the number of the layer; the first that matches all of it counts.
_IN_LAYER: tuple[tuple[Role, str], ...] = (
    (Role.NORM, r"(?:.*[._])?\w*norm\w*\.weight|(?:.*\.)?ln_?\d*\.weight|layer_scalar|.*\.sinks"),
    (Role.ROUTER, rf"(?:{_BLOCK}\.)?(?:router|gate)(?:\.(?:layer|proj|wg))?\.(?:weight|bias|scale|per_expert_scale)"),
    (Role.ROUTER, rf"(?:{_BLOCK}\.)?(?:router\.|gate\.)?(?:router\.)?(?:e_score_correction_bias|expert_bias)"),
    (Role.ROUTER, r"router\.(?:scale|per_expert_scale)"),
    (Role.SHARED_GATE, rf"{_BLOCK}\.shared_experts?_gate\.weight"),
    (Role.STATE, r"(?:linear_attn|mamba|mixer)\.(?:A_log|D|dt_bias|conv1d\.(?:weight|bias))"),
    (Role.STATE, r"linear_attn\.in_proj_(?:ba|a|b)\.weight"),
    (Role.STATE, r"mamba\.(?:x_proj|dt_proj)\.(?:weight|bias)|conv\.conv\.(?:weight|bias)"),
    (Role.BIAS, r".*(?:\.bias|_bias)"),
    (Role.ROUTED_EXPERT, rf"(?:{_BLOCK}\.)?experts\.(?:\d+\.)?{_MLP}(?:\.weight)?"),
    (Role.ROUTED_EXPERT, r"block_sparse_moe\.(?:input|output)_linear\.weight"),
    (Role.ROUTED_EXPERT, rf"(?:{_BLOCK}\.)?experts{re.escape(UP_INPUTS)}"),
    (Role.SHARED_EXPERT, rf"(?:{_BLOCK}\.)?(?:shared_experts?|shared_mlp)\.{_MLP}\.weight"),
    (Role.LATENT_ATTENTION, r"self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight"),
    (Role.ATTENTION, r"(?:self_attn|attention|attn)\.(?:q|k|v|o|qkv|out|c)_proj\.weight"),
    (Role.ATTENTION, r"mixer\.(?:q|k|v|o)_proj\.weight"),  # its out_proj is Mamba's
    (Role.STATE_SPACE, r"(?:linear_attn|mamba|mixer|conv)\.(?:in_proj(?:_qkvz|_qkv|_z)?|out_proj)\.weight"),
    (Role.LATENT_PROJECTION, rf"{_BLOCK}\.fc[12]_latent_proj\.weight"),
    (Role.PER_LAYER_INPUT, r"per_layer_(?:input_gate|projection)\.weight"),
    (Role.DENSE_MLP, rf"{_BLOCK}\.{_MLP}\.weight"),
)  # fmt: skip

_VALUE = re.compile(r"(?:.*\.)?v_proj(?:\.weight)?")
_OUT = re.compile(r"(?:.*\.)?(?:down_proj|o_proj|out_proj|c_proj|w2|fc2|fc2_latent_proj|output_linear)(?:\.weight)?")

#: By the whole name, without `model.`, `language_model.` or `backbone.` in front.
_OUTSIDE: tuple[tuple[Role, str], ...] = (
    (Role.OTHER_INPUT, r"(?:vision|visual|audio|multi_modal|mm_|embed_(?:vision|audio))\w*(?:\..*)?"),
    (Role.EMBEDDING, r"(?:embed_tokens|embeddings|wte)\.weight"),
    (Role.PER_LAYER_INPUT, r"embed_tokens_per_layer\.weight|per_layer_model_projection\.weight"),
    (Role.HEAD, r"lm_head\.weight"),
    (Role.BIAS, r"lm_head\.bias"),
    (Role.NORM, r"\w*norm\w*\.weight|\w*norm\w*\.bias"),
)

#: GGUF has names of its own.
_GGUF: tuple[tuple[Role, str], ...] = (
    (Role.NORM, r"(?:blk\.\d+\.)?\w*norm\w*\.(?:weight|bias)|blk\.\d+\.attn_sinks\.weight|rope_freqs\.weight"),
    (Role.ROUTER, r"blk\.\d+\.(?:ffn_gate_inp\.(?:weight|bias|scale)|exp_probs_b\.bias|ffn_down_exps\.scale)"),
    (Role.SHARED_GATE, r"blk\.\d+\.ffn_gate_inp_shexp\.weight"),
    (Role.STATE, r"blk\.\d+\.ssm_(?:a|d|dt|conv1d|ba|alpha|beta)(?:\.(?:weight|bias))?"),
    (Role.BIAS, r".*\.bias"),
    (Role.ROUTED_EXPERT, r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight"),
    (Role.SHARED_EXPERT, r"blk\.\d+\.ffn_(?:gate|up|down)_shexp\.weight"),
    (Role.LATENT_ATTENTION, r"blk\.\d+\.attn_(?:q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)\.weight"),
    (Role.ATTENTION, r"blk\.\d+\.attn_(?:q|k|v|qkv|output|gate)\.weight"),
    (Role.STATE_SPACE, r"blk\.\d+\.ssm_(?:in|out)\.weight"),
    (Role.LATENT_PROJECTION, r"blk\.\d+\.ffn_latent_(?:down|up)\.weight"),
    (Role.DENSE_MLP, r"blk\.\d+\.ffn_(?:gate|up|down)\.weight"),
    (Role.PER_LAYER_INPUT, r"(?:blk\.\d+\.(?:inp_gate|proj)|per_layer_\w+)\.weight"),
    (Role.EMBEDDING, r"token_embd\.weight"),
    (Role.HEAD, r"output\.weight"),
)  # fmt: skip

_LAYER = re.compile(r"(?P<layer>.*?\b(?:layers|blocks|h)\.\d+)\.(?P<tail>.+)")
_GGUF_LAYER = re.compile(r"(?P<layer>blk\.\d+)\.")
_PREFIX = re.compile(r"(?:model\.|language_model\.|backbone\.|transformer\.)*")


def _first(rules: Iterable[tuple[Role, str]], text: str) -> Role | None:
    return next((role for role, pattern in rules if re.fullmatch(pattern, text)), None)


def _named(name: str) -> tuple[str | None, Role | None]:
    """The layer that a name says it is of, and the role that its name alone tells."""
    if gguf := _GGUF_LAYER.match(name):
        return gguf["layer"], _first(_GGUF, name)
    bare = _PREFIX.sub("", name, count=1)
    if (outside := _first(_OUTSIDE, bare)) is not None:
        return None, outside
    if within := _LAYER.fullmatch(name):
        return within["layer"], _first(_IN_LAYER, within["tail"])
    return None, _first(_GGUF, name)


def roles_of(names: Iterable[str]) -> dict[str, Role]:
    """The role of every tensor of one checkpoint.

    names: as they stand in the file (safetensors or GGUF) or in the state dict of a model. An MLP that runs in a layer
    beside routed experts is a shared expert however it is called (Gemma 4), and a shared one without routed experts
    beside it is a dense MLP (Granite). Raises UnsupportedModelError that names the tensors that no rule knows.
    """
    names = list(names)
    known = set(names)
    told = {name: _named(base if (base := packed_name(name)) in known else name) for name in names}
    if unknown := sorted(name for name, (_, role) in told.items() if role is None):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UnsupportedModelError(
            f"tensor {unknown[0]!r}{more}: no rule says what it is for, and nothing is guessed; name a model of a "
            f"known family, or add the name to rotaryquant.models.roles"
        )
    routed = {layer for layer, role in told.values() if role is Role.ROUTED_EXPERT}
    return {name: _beside(role, layer in routed) for name, (layer, role) in told.items() if role is not None}


def parts_of(names: Iterable[str]) -> dict[str, Part]:
    """Role and side of every tensor of one checkpoint; raises as `roles_of` does. Names are not those of GGUF."""
    return {name: Part(role, _side(packed_name(name))) for name, role in roles_of(names).items()}


def _side(name: str) -> Side:
    if _VALUE.fullmatch(name):
        return Side.VALUE
    return Side.OUT if _OUT.fullmatch(name) else Side.IN


def packed_name(name: str) -> str:
    """The tensor that scales or factors of that name are of; any other name as it is."""
    return name.removesuffix(SCALE) if name.endswith(SCALE) else name.removesuffix(INPUTS)


class ExpertMatrix(NamedTuple):
    """What the name of a routed expert's matrix says.

    module: of all experts of the layer. number: of the expert, or None for a stack of all. down: whether its inputs are
    the expert's own and not those of the layer.
    """

    module: str
    number: int | None
    down: bool


_EXPERT = re.compile(r"(?P<module>.*\bexperts)\.(?:(?P<number>\d+)\.)?(?P<leaf>\w+?)(?:\.weight)?")
_FUSED = re.compile(r"(?P<module>.*\bblock_sparse_moe)\.(?P<leaf>input_linear|output_linear)\.weight")


def expert_matrix(name: str) -> ExpertMatrix:
    """Which experts' matrix a tensor is that `roles_of` says is one of them. Raises UnsupportedModelError otherwise."""
    if found := _EXPERT.fullmatch(name):
        number = found["number"]
        return ExpertMatrix(found["module"], None if number is None else int(number), found["leaf"] in _DOWN)
    if found := _FUSED.fullmatch(name):
        return ExpertMatrix(f"{found['module']}.experts", None, found["leaf"] in _DOWN)
    raise UnsupportedModelError(f"tensor {name!r} is of a routed expert, but no rule says of which")


def inputs_name(name: str, role: Role) -> str:
    """The name of the factors of a packed matrix' inputs: its own, or those that all experts of its layer share."""
    if role is Role.ROUTED_EXPERT and not (found := expert_matrix(name)).down:
        return found.module + UP_INPUTS
    return name + INPUTS


def _beside(role: Role, routed: bool) -> Role:
    """The role of a tensor, given whether its layer has routed experts."""
    if role is Role.DENSE_MLP and routed:
        return Role.SHARED_EXPERT
    return Role.DENSE_MLP if role is Role.SHARED_EXPERT and not routed else role


def layer_number(name: str) -> int | None:
    """The number of the layer that a tensor is of, or None outside of all layers."""
    found = _LAYER.fullmatch(name) or _GGUF_LAYER.match(name)
    return int(found["layer"].rpartition(".")[2]) if found else None


def grouped(roles: Mapping[str, Role]) -> dict[Role, list[str]]:
    """Names by role, in the order of `Role`."""
    return {role: names for role in Role if (names := [name for name, own in roles.items() if own is role])}
