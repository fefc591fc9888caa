"""RoPE undone: what attention turned comes back, for every family that can be packed; else a clear refusal."""

import sys
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers import undo_rope
from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
from rotaryquant.integrations.transformers.undo_rope import key_ropes
from support import zoo
from support.models import tiny

TOKENS = 24


def listen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Every pair of [heads, tokens, width] that the model's RoPE takes and gives, as they come."""
    module = sys.modules[type(model).__module__]
    heard: list[tuple[Tensor, Tensor]] = []
    turn = getattr(module, "apply_rotary_pos_emb", None)
    if turn is None:
        return heard

    def listening(*rows: Any, **options: Any) -> Any:
        made = turn(*rows, **options)
        given = rows[1] if isinstance(made, tuple) else rows[0]
        got = made[1] if isinstance(made, tuple) else made
        swapped = options.get("unsqueeze_dim") == 2
        heard.append(tuple((part[0].transpose(0, 1) if swapped else part[0]) for part in (given, got)))  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(module, "apply_rotary_pos_emb", listening)
    return heard


@pytest.mark.parametrize("name", zoo.PACKABLE)
def test_keys_come_back_as_they_were_before_rope(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    ropes = key_ropes(model, read_geometry(text_config(model)))
    assert set(ropes) == {layer.index for layer in read_geometry(text_config(model)) if layer.packable}
    heard, cache, positions = listen(model, monkeypatch), DynamicCache(config=model.config), torch.arange(TOKENS)
    with torch.inference_mode():
        model(torch.randint(0, zoo.VOCAB, (1, TOKENS)), cache=cache)
    turned = 0
    for index, rope in ropes.items():
        held = cache.layers[index].keys
        assert isinstance(held, Tensor)
        plain = rope.undo(held[0], positions)
        before = [given for given, got in heard if got.shape == held[0].shape and torch.equal(got, held[0])]
        turned += len(before)
        assert torch.allclose(plain, before[0] if before else held[0], atol=1e-4)
        assert torch.allclose(rope.redo(plain, positions), held[0], atol=1e-4)
        late = rope.undo(rope.redo(plain, positions + 100), positions + 100)
        assert torch.allclose(late, plain, atol=1e-4)
    assert turned == (0 if name == "nemotron_h" else len(ropes))


def test_gradients_are_turned_as_a_chain_rule_does() -> None:
    """gpt-oss scales its angles, so that the inverse is not the transpose."""
    model = zoo.build("gpt_oss")
    rope = key_ropes(model, read_geometry(text_config(model)))[1]
    positions, plain, slope = torch.arange(5), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    moved = torch.randn(2, 5, 32)
    change = (slope * rope.redo(moved, positions)).sum()
    assert float((rope.gradients(slope, positions) * moved).sum()) == pytest.approx(float(change), rel=1e-4)
    assert float(rope.redo(plain, positions).norm() / plain.norm()) > 1.1


def test_layers_without_rope_are_left_as_they_are() -> None:
    """SmolLM3 turns the keys of some layers alone."""
    options = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = hf.SmolLM3Config(vocab_size=64, num_hidden_layers=2, no_rope_layers=[1, 0], pad_token_id=0, **options)
    ropes = key_ropes(hf.SmolLM3ForCausalLM(config).eval(), read_geometry(config))
    rows, positions = torch.randn(2, 6, 16), torch.arange(6)
    assert torch.equal(ropes[1].undo(rows, positions), rows)
    assert not torch.allclose(ropes[0].undo(rows, positions), rows, atol=0.1)


def test_angles_that_depend_on_the_length_are_refused() -> None:
    model = tiny(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(
        UnsupportedModelError, match=r"llama: RoPE cannot be undone, its angles depend on the length of"
    ):
        key_ropes(model, read_geometry(model.config))


def test_a_function_whose_arguments_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    module = sys.modules[type(model).__module__]
    turn = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda queries, keys, c, s: turn(queries, keys, c, s))
    with pytest.raises(
        UnsupportedModelError, match="llama: RoPE cannot be undone, what the keys of layer 0 are turned by"
    ):
        key_ropes(model, read_geometry(model.config))


def test_keys_that_are_turned_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that turns its keys a second time, by an angle of its own."""
    model = tiny()
    module = sys.modules[type(model).__module__]
    turn = module.apply_rotary_pos_emb

    def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return turn(*turn(q, k, cos, sin), cos, sin)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", twice)
    assert key_ropes(model, read_geometry(model.config))  # by the model's own function all is well
    monkeypatch.setattr(undo_rope, "_rotary_function", lambda model: turn)
    with pytest.raises(UnsupportedModelError, match="what the keys of layer 0 are turned by is unknown"):
        key_ropes(model, read_geometry(model.config))
