"""What a process takes while it reads prompts and answers: the parts, and the peak that the system will report.

What follows from shapes is computed. Two parts do not: what interpreter, torch and transformers take, and what torch's
CPU backend keeps of products that it has compiled. Both were measured (Linux, x86-64, torch 2.13, CPU; docs/planning.md
says how and against what) and stand here as constants.
"""

import math
from dataclasses import dataclass

from rotaryquant.config import KVCacheConfig
from rotaryquant.kv.footprint import Footprint
from rotaryquant.models.roles import Role
from rotaryquant.planning.checkpoint import Checkpoint
from rotaryquant.planning.weights import AS_IS, Weights

#: Interpreter, torch, transformers, a tokenizer and the pages of their libraries that a first answer touches.
PROCESS_BYTES = 500_000_000

#: oneDNN keeps a compiled product for each shape, up to 1,024 of them. Routed experts in 16 bits ask for another shape
#: for each number of tokens that goes to one, so that the store fills with a prompt: to within 1/e of all this after
#: _PRODUCTS_TOKENS. Packed experts are multiplied by kernels of this package, which keep nothing.
PRODUCTS_BYTES = 290_000_000
_PRODUCTS_TOKENS = 800

#: Prompt tokens in one forward on the CPU (integrations.transformers.session.CHUNK; a test holds them together).
CHUNK = 512

#: Families whose attention has a soft cap or learned sinks: it is computed in plain fp32, with all scores at once.
_WHOLE_SCORES = ("gemma2", "gpt_oss")


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for; the sum is what the system reports as the peak of the process.

    process: see `PROCESS_BYTES`. weights: of the model. files: pages of the files that experts were joined from, which
    the system takes back when it needs them. cache: keys and values of all clients, as memory is taken. states: of
    recurrent layers, all clients. prompt: the newest prompt kept exact until it is packed. forward: activations of one
    chunk of a prompt. products: see `PRODUCTS_BYTES`.
    """

    process: int
    weights: int
    files: int
    cache: int
    states: int
    prompt: int
    forward: int
    products: int

    @property
    def peak(self) -> int:
        """Largest resident size, where memory is plenty."""
        return self.needed + self.files

    @property
    def needed(self) -> int:
        """The same without what the system can take back: what has to fit."""
        kept = self.process + self.weights + self.cache + self.states
        return kept + self.prompt + self.forward + self.products


def predict(checkpoint: Checkpoint, weights: Weights, kv: KVCacheConfig | None, context: int, clients: int) -> Memory:
    """Memory of `clients` sequences of `context` tokens each, whose prompts are read one after the other."""
    decoder, element = checkpoint.decoder, checkpoint.element_bytes
    footprint = Footprint(decoder.layers, kv)
    return Memory(
        PROCESS_BYTES,
        weights.total,
        weights.merged if checkpoint.source == "safetensors" else 0,
        footprint.held_bytes(context, element) * clients,
        sum(layer.state_bytes(element) for layer in decoder.layers) * clients,
        footprint.prompt_bytes(context, element),
        _forward_bytes(checkpoint, weights, context),
        _products_bytes(checkpoint, weights, context),
    )


def _forward_bytes(checkpoint: Checkpoint, weights: Weights, context: int) -> int:
    """Activations of one chunk in the layer that has most of them, and the attention mask."""
    decoder, rows = checkpoint.decoder, min(CHUNK, context)
    outside = {Role.EMBEDDING, Role.HEAD, Role.OTHER_INPUT, Role.PER_LAYER_INPUT, Role.ROUTED_EXPERT}
    inside = [one for one in checkpoint.tensors if len(one.shape) == 2 and checkpoint.roles[one.name] not in outside]
    wide = max((one.shape[-2] for one in inside), default=0)
    routed = 0
    if weights.experts:
        widths = [one.shape for one in checkpoint.tensors if checkpoint.roles[one.name] is Role.ROUTED_EXPERT]
        inner = max((min(shape[-2:]) for shape in widths if len(shape) > 1), default=0)
        routed = weights.per_token * (4 * decoder.hidden + 3 * inner)
    values = rows * (6 * decoder.hidden + max(3 * wide, routed))
    mask = rows * context * (1 + checkpoint.element_bytes)
    heads = max((layer.num_heads for layer in decoder.layers), default=0)
    scores = 3 * 4 * heads * rows * context if decoder.family in _WHOLE_SCORES else 0
    return values * checkpoint.element_bytes + mask + scores


def _products_bytes(checkpoint: Checkpoint, weights: Weights, context: int) -> int:
    """What compiled products of routed experts take after so many tokens."""
    rounded = weights.recipe != AS_IS or checkpoint.packed is not None
    if not weights.experts or rounded or checkpoint.element_bytes == 4:
        return 0
    return round(PRODUCTS_BYTES * (1 - math.exp(-context / _PRODUCTS_TOKENS)))
