"""A tiny Llama as a GGUF file, with a byte-level vocabulary."""

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB = 256 + 4 + 1
BLOCKS, WIDTH, HEADS, KV_HEADS, INNER = 2, 64, 2, 1, 96


def write_gguf(path: Path, *, eot: int | None = None, seed: int = 0) -> Path:
    """Write the file. eot: id of an end-of-turn token besides the end of text (257)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    names = [name for _, name in sorted(bytes_to_unicode().items())]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*names, "<bos>", "<eos>", "<eot>", "<pad>", "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if eot is not None:
        writer.add_eot_token_id(eot)
    rng = np.random.default_rng(seed)
    head = WIDTH // HEADS
    shapes = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    for block in range(BLOCKS):
        shapes |= {
            f"blk.{block}.attn_q": (WIDTH, WIDTH),
            f"blk.{block}.attn_k": (KV_HEADS * head, WIDTH),
            f"blk.{block}.attn_v": (KV_HEADS * head, WIDTH),
            f"blk.{block}.attn_output": (WIDTH, WIDTH),
            f"blk.{block}.ffn_gate": (INNER, WIDTH),
            f"blk.{block}.ffn_up": (INNER, WIDTH),
            f"blk.{block}.ffn_down": (WIDTH, INNER),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32) * 0.1)
    norms = ["output_norm", *(f"blk.{b}.{n}" for b in range(BLOCKS) for n in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
