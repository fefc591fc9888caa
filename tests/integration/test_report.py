"""What is in force, layer by layer, for models whose layers are not all alike."""

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rotaryquant import enabled
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.geometry import read_geometry
from rotaryquant.integrations.transformers.report import layer_bits
from support.drive import ROUNDED, round_queries, teacher_forced
from support.kernels import force_kernel
from support.models import LOSSLESS_STRICT, random_tokens, relative_error, tiny
from support.zoo import granite_hybrid, sharpen


def windows(layers: int = 6, window: int = 8, widths: tuple[int, int] = (32, 64)) -> PreTrainedModel:
    """Gemma-4-like: one global layer of its own width and KV heads, the others with a sliding window."""
    config = hf.Gemma4TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=widths[0], global_head_dim=widths[1], num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=window, max_position_embeddings=512, eos_token_id=None,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=256, num_kv_shared_layers=0,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    return sharpen(hf.Gemma4ForCausalLM(config).eval())


def test_windowed_layers_stay_and_are_reported() -> None:
    """Six layers, five with a window of 8 that wraps several times: the same tokens, and one layer packed."""
    model = windows()
    ids = random_tokens(1, 40, vocab=256)
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    with enabled(model, LOSSLESS_STRICT) as state:
        assert state is not None
        assert "1 of 6 layers packed" in state.report().summary()  # said before the first request
        assert "5 left: a sliding window is bounded already" in state.report().summary()
        got = model.generate(ids, max_new_tokens=20, do_sample=False)
        report = state.report()
        assert state.cache is not None
        assert state.cache.counters.packed_reads > 0
    assert torch.equal(got, want)
    assert [layer.kept for layer in report.layers] == ["16-bit"] * 5 + ["packed"]
    assert [(layer.num_kv_heads, layer.head_dim) for layer in report.layers] == [(2, 32)] * 5 + [(1, 64)]
    assert report.packed[0].nbytes > 0


def test_only_attention_layers_of_a_hybrid_are_packed() -> None:
    """Attention at 3 and 7 of 8: layer 0, which has no keys, decides nothing; states are as in a stock run."""
    torch.manual_seed(0)
    model = sharpen(hf.GraniteMoeHybridForCausalLM(granite_hybrid((3, 7), 8)).eval())
    ids = random_tokens(1, 20, vocab=256)
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=stock)
    with enabled(model, LOSSLESS_STRICT) as state:
        assert state is not None
        got = model.generate(ids, max_new_tokens=16, do_sample=False)
        report = state.report()
        cache = state.new_cache()
        with torch.no_grad():
            model(ids, cache=cache)
    assert torch.equal(got, want)
    assert [layer.index for layer in report.packed] == [3, 7]
    assert "2 of 8 layers packed" in report.summary()
    assert "6 left: state layer: no keys or values" in report.summary()
    assert [layer.layer for layer in cache.packed_layers()] == [3, 7]
    for index in (0, 1, 2, 4, 5, 6):
        ours, theirs = cache.layers[index], stock.layers[index]
        assert type(ours) is type(theirs)
        for name in ("conv_states", "recurrent_states"):
            for key, tensor in getattr(theirs, name).items():
                assert torch.allclose(getattr(ours, name)[key], tensor, atol=1e-5)


def test_rotations_follow_the_model_layer_number() -> None:
    """A packed layer is seeded by where it stands in the model, not among packed layers."""
    torch.manual_seed(0)
    model = sharpen(hf.GraniteMoeHybridForCausalLM(granite_hybrid((1, 3), 4)).eval())
    with enabled(model, "iso3-strict") as state:
        assert state is not None
        model.generate(random_tokens(1, 20, vocab=256), max_new_tokens=2, do_sample=False)
        assert state.cache is not None
        first, second = state.cache.packed_layers()
    assert first.keys is not None
    assert second.keys is not None
    assert (first.layer, second.layer) == (1, 3)
    assert not torch.equal(first.keys.rotation.signs, second.keys.rotation.signs)


def test_width_comes_from_its_field_not_from_a_quotient() -> None:
    """hidden 2304 over 8 heads would be 288; the field says 256."""
    model = tiny(hidden_size=2304, num_attention_heads=8, head_dim=256, intermediate_size=64, num_hidden_layers=1)
    (layer,) = read_geometry(model.config)
    assert (layer.head_dim, layer.num_heads, layer.num_kv_heads) == (256, 8, 2)
    ids = random_tokens(1, 140)
    with enabled(model, "iso3-strict") as state:
        assert state is not None
        model.generate(ids, max_new_tokens=2, do_sample=False)
        report = state.report()
    assert report.packed[0].row_bytes == 2 * 2 * (96 + 2)
    assert state.cache is not None
    packed = state.cache.packed_layers()[0]
    assert packed.keys is not None
    assert packed.keys.packed.codes[0].shape[1:] == (2, 128, 96)


def test_width_falls_back_to_the_quotient_where_the_field_is_absent() -> None:
    config = hf.Qwen2MoeConfig(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=1)
    assert not getattr(config, "head_dim", None)
    (layer,) = read_geometry(config)
    assert (layer.head_dim, layer.num_kv_heads) == (32, 1)


def test_widths_of_256_and_512_in_one_model() -> None:
    """Each layer has its own width, rotation and codebook; bytes are counted per layer."""
    model = windows(layers=2, widths=(256, 512))
    ids = random_tokens(1, 24, vocab=256)
    mask = torch.ones_like(ids)
    want = teacher_forced(model, ids, mask, DynamicCache(config=model.config), [16] + [1] * 8)
    with enabled(model, LOSSLESS_STRICT) as state:
        assert state is not None
        got = teacher_forced(model, ids, mask, state.new_cache(), [16] + [1] * 8)
    assert relative_error(got, want) < 1e-5
    with enabled(model, "iso3-strict") as state:
        assert state is not None
        model.generate(ids, max_new_tokens=2, do_sample=False)
        report = state.report()
    assert [(layer.head_dim, layer.row_bytes) for layer in report.layers] == [(256, 0), (512, 2 * (192 + 2))]


@pytest.mark.parametrize("heads", [(6, 1), (12, 2), (5, 1), (7, 1)])
def test_any_ratio_of_query_to_kv_heads(heads: tuple[int, int]) -> None:
    model = tiny(hidden_size=16 * heads[0], num_attention_heads=heads[0], num_key_value_heads=heads[1])
    ids = random_tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    chunks = [33] + [1] * 7
    want = teacher_forced(model, ids, mask, DynamicCache(config=model.config), chunks)
    with enabled(model, LOSSLESS_STRICT) as state:
        assert state is not None
        got = teacher_forced(model, ids, mask, state.new_cache(), chunks)
        (layer, _) = state.report().packed
    assert layer.num_kv_heads == heads[1]
    assert relative_error(got[mask.bool()], want[mask.bool()]) < 1e-5


@pytest.mark.parametrize("width", [80, 96, 112, 128])
def test_widths_beyond_powers_of_two_generate(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(head_dim=width)
    ids = random_tokens(1, 140)
    round_queries(monkeypatch)
    found = []
    for kernel in ("auto", "reference"):
        force_kernel(monkeypatch, kernel)
        with enabled(model, "iso3-strict") as state:
            options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            found.append(model.generate(ids, **options))
            assert state is not None
            assert state.report().packed[0].row_bytes == 2 * 2 * (width * 3 // 8 + 2)
    ours, reference = found
    assert ours.sequences.shape == (1, 148)
    # the second token is the first that reads packed rows; later ones may follow another first choice
    assert int(ours.sequences[0, 140]) == int(reference.sequences[0, 140])
    assert relative_error(ours.logits[1], reference.logits[1]) < ROUNDED


def test_a_biased_key_projection_is_protected_and_named() -> None:
    """k_proj.bias of norm 600 in layer 0 alone, as in Qwen2."""
    model = tiny(attention_bias=True, head_dim=128)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, projection).bias.zero_()
        bias = model.model.layers[0].self_attn.k_proj.bias.view(2, 128)
        bias[:, [3, 40, 77, 101]] = 300.0
        model.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
    ids = random_tokens(1, 260)
    with enabled(model, "iso3") as state:
        assert state is not None
        model.generate(ids, max_new_tokens=4, do_sample=False)
        report = state.report()
    assert report.packed[0].key_bits == 8
    assert report.packed[0].note.startswith("boosted: keys would err by ")
    assert "layer 0: boosted: " in report.summary()
    assert (report.packed[1].key_bits, report.packed[1].note) == (3, "")
    with enabled(model, "iso3,protect=off") as state:
        assert state is not None
        model.generate(ids, max_new_tokens=4, do_sample=False)
        report = state.report()
    assert report.packed[0].key_bits == 3
    assert "layer 0: exposed: " in report.summary()


def test_report_is_plain_data() -> None:
    with enabled(tiny(), "iso3") as state:
        assert state is not None
        data = state.report().as_dict()
    assert data["kv"] == "iso3"
    assert data["layers"][0]["row_bytes"] == 2 * (26 + 26)
    assert {type(value) for value in data["layers"][1].values()} <= {int, str}


def test_layer_bits_follow_the_cache() -> None:
    model = tiny()
    with enabled(model, "k4v3") as state:
        assert state is not None
        cache = state.new_cache()
        with torch.no_grad():
            model(random_tokens(1, 20), cache=cache)
            with pytest.raises(ConfigError, match=r"layer 0: nothing is packed yet \(20 tokens\)"):
                layer_bits(cache)
            model(random_tokens(1, 130), cache=cache)
            model(random_tokens(1, 1), cache=cache)
        found = layer_bits(cache)
    assert [(record.keys.bits, record.values.bits) for record in found] == [(4, 3)] * 2
