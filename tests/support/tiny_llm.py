"""A tiny language model and a byte-level tokenizer, made on the spot: folders that load like real ones."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.models import BPE

from rotaryquant.integrations.transformers.quiet import quiet

SPECIALS = ("<pad>", "<bos>", "<eos>", "<turn>", "<end>")
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def byte_tokenizer(*, bos: str | None = "<bos>", add_bos: bool = False, template: str | None = TEMPLATE) -> Any:
    """Every byte is a token, ids behind the special ones.

    bos: its BOS token, or none. add_bos: whether its post-processor puts that in front.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    raw = Tokenizer(BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIALS))
    if add_bos and bos is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    made = hf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", bos_token=bos)
    made.chat_template = template
    return made


def pieces_tokenizer() -> Any:
    """Like SentencePiece: words begin with a mark for the space, missing characters fall back to bytes."""
    words = ["<unk>", "▁", "▁hello", "▁world", "lo", "▁▁", "!"]
    vocab = [(word, 0.0) for word in words] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    raw = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<end>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>")


def tiny_config(**changes: Any) -> hf.LlamaConfig:
    """Two layers of two heads, 32 wide."""
    options: dict[str, Any] = {
        "vocab_size": 261, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4, "dtype": "float32",
    }  # fmt: skip
    return hf.LlamaConfig(**(options | changes))


def tiny_model(**changes: Any) -> Any:
    """A random model in fp32; the logits are spread enough that greedy choices are no ties."""
    torch.manual_seed(1)
    model = hf.LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
        model.lm_head.weight[:5] = 0.0  # the special ones never win, so answers run on
    return model


def save_tiny(folder: Path, tokenizer: Any = None, **changes: Any) -> Path:
    """A model folder as `LLM.load` reads it."""
    with quiet():
        tiny_model(**changes).save_pretrained(folder)
        (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder
