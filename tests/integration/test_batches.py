"""Rows of a batch that come, go, fork and go back: each stays what it is alone."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rotaryquant import KVCacheConfig, enabled
from rotaryquant.config import PRESETS
from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.cache import PackedCache
from support.drive import left_padded, teacher_forced
from support.kernels import force_kernel
from support.models import LOSSLESS, LOSSLESS_STRICT, random_tokens, relative_error, tiny
from support.zoo import build

STRICT3 = PRESETS["iso3-strict"]
assert STRICT3 is not None


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


class Batch:
    """A greedy decoding loop over rows that may join and leave; tokens[name] is what a row said."""

    def __init__(self, model: PreTrainedModel, cache: PackedCache, prompts: dict[str, Tensor]) -> None:
        self.model = model
        self.names = list(prompts)
        self.tokens: dict[str, list[int]] = {name: [] for name in prompts}
        ids, self.mask = left_padded(list(prompts.values()))
        self.cache = cache
        with cache.prefill():
            self.logits = self._forward(ids)

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad():
            out = self.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, cache=self.cache)
        return out.logits[:, -1]

    def step(self) -> None:
        chosen = self.logits.argmax(-1)
        for name, token in zip(self.names, chosen.tolist(), strict=True):
            self.tokens[name].append(token)
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        self.logits = self._forward(chosen[:, None])

    def leave(self, name: str) -> None:
        keep = torch.tensor([index for index, other in enumerate(self.names) if other != name])
        self.cache.batch_select_indices(keep)
        self.mask, self.logits = self.mask[keep], self.logits[keep]
        self.names.remove(name)

    def join(self, other: "Batch") -> None:
        self.cache = PackedCache.merge(self.model.config, [self.cache, other.cache])
        columns = self.cache.get_seq_length()
        masks = []
        for mask in (self.mask, other.mask):
            masks.append(torch.nn.functional.pad(mask, (columns - mask.shape[1], 0)))
        self.mask = torch.cat(masks)
        self.logits = torch.cat([self.logits, other.logits])
        self.names += other.names
        self.tokens |= other.tokens


def alone(model: PreTrainedModel, kv: KVCacheConfig, prompt: Tensor, steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of one prompt, and by how much the top token led at each step."""
    with enabled(model, kv) as state:
        assert state is not None
        batch, leads = Batch(model, state.new_cache(), {"it": prompt}), []
        for _ in range(steps):
            best = batch.logits[0].topk(2).values
            leads.append(float(best[0] - best[1]))
            batch.step()
    return batch.tokens["it"], leads


@pytest.mark.parametrize("kv", [LOSSLESS_STRICT, STRICT3, LOSSLESS], ids=lambda kv: kv.name)
@pytest.mark.parametrize("long", [40, 150])
def test_rows_that_join_and_leave_change_nothing_for_the_others(
    model: PreTrainedModel, kv: KVCacheConfig, long: int
) -> None:
    """Prompts of 3, 9, 17 and 40 (or 150) tokens; the longest leaves after 2 steps, another joins at step 5."""
    prompts = {str(n): random_tokens(1, n, seed=n)[0] for n in (3, 9, 17, long)}
    newcomer = random_tokens(1, 23, seed=99)[0]
    with enabled(model, kv) as state:
        assert state is not None
        batch = Batch(model, state.new_cache(), prompts)
        for step in range(32):
            if step == 2:
                batch.leave(str(long))
            if step == 5:
                batch.join(Batch(model, state.new_cache(), {"new": newcomer}))
            batch.step()
    for name, prompt in (prompts | {"new": newcomer}).items():
        said = batch.tokens[name]
        assert len(said) == {str(long): 2, "new": 27}.get(name, 32)
        want, leads = alone(model, kv, prompt, len(said))
        differ = [step for step, (a, b) in enumerate(zip(said, want, strict=True)) if a != b]
        # the batched matrix products round otherwise: only a tie of the top two may turn
        assert not differ or leads[differ[0]] < 1e-3, (name, differ)


def test_joining_needs_packed_layers_alone() -> None:
    model = build("granitemoehybrid")
    with enabled(model, LOSSLESS_STRICT) as state, torch.no_grad():
        assert state is not None
        caches = [state.new_cache(), state.new_cache()]
        for cache in caches:
            model(random_tokens(1, 5, vocab=256), cache=cache)
        with pytest.raises(
            UnsupportedModelError, match=r"layer 0 is a LinearAttentionLayer.*merge needs packed layers"
        ):
            PackedCache.merge(model.config, caches)


@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
def test_selected_rows_go_on_as_they_were(model: PreTrainedModel, indices: Tensor) -> None:
    ids = random_tokens(3, 30)
    rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
    mask = torch.ones_like(ids)
    with enabled(model, STRICT3) as state:
        assert state is not None
        whole = teacher_forced(model, ids, mask, state.new_cache(), [20] + [1] * 10)
        cache = state.new_cache()
        teacher_forced(model, ids, mask, cache, [20])
        cache.batch_select_indices(indices)
        got = teacher_forced(model, ids[rows], mask[rows], cache, [1] * 10, start=20)
    assert relative_error(got, whole[rows, 20:]) < 1e-5


def test_repeated_rows_share_their_past_and_part_ways(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, "reference")  # kernels round queries: an ulp may move one by a step
    ids = random_tokens(2, 200)
    futures = random_tokens(6, 12, seed=5)
    with enabled(model, STRICT3) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(ids, cache=cache)
        held = cache.nbytes
        cache.batch_repeat_interleave(3)
        assert cache.nbytes <= held + 3 * 2 * 200 * 64  # the block tables and the exact rows, not the blocks
        sequences = torch.cat([ids.repeat_interleave(3, 0), futures], 1)
        mask = torch.ones_like(sequences)
        got = teacher_forced(model, sequences, mask, cache, [1] * 12, start=200)
        for row in range(6):
            single = state.new_cache()
            with single.prefill():
                model(ids[row // 3 : row // 3 + 1], cache=single)
            want = teacher_forced(model, sequences[row : row + 1], mask[:1], single, [1] * 12, start=200)
            assert relative_error(got[row : row + 1], want) < 1e-4


@pytest.mark.parametrize(
    ("kv", "columns", "packed"),
    [("iso3", 270, 256), ("iso3,tail=1", 220, 256), ("iso3-strict", 240, 279), ("iso3,tail=off", 240, 279)],
)
def test_every_beam_attends_to_its_own_history(model: PreTrainedModel, kv: str, columns: int, packed: int) -> None:
    """The score of each returned beam is what its tokens get when they are forced on a cache of their own.

    A shared open block is written on the way, and sealed: with 192, 224 and 256 positions packed, all of the prompt;
    with a tail of 1, up to 36 of them each beam's own; without one, token by token.
    """
    prompt = random_tokens(1, columns, seed=2)
    with enabled(model, kv) as state:
        assert state is not None
        out = model.generate(
            prompt,
            max_new_tokens=40,
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len({tuple(row) for row in out.sequences.tolist()}) == 3
        assert state.cache is not None
        assert state.cache.packed_layers()[0].rows[0].packed_len == packed
        for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
            cache = state.new_cache()
            mask = torch.ones_like(sequence[None])
            with cache.prefill():
                first = teacher_forced(model, sequence[None], mask, cache, [columns])
            rest = teacher_forced(model, sequence[None], mask, cache, [1] * 39, start=columns)
            logits = torch.cat([first[:, -1:], rest], 1)[0].float()
            chosen = logits.log_softmax(-1)[torch.arange(40), sequence[columns:]]
            assert float(chosen.sum()) == pytest.approx(float(score), abs=2e-2)


def test_sampled_sequences_part_ways_after_a_shared_prompt(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_kernel(monkeypatch, "reference")  # kernels round queries: an ulp may move one by a step
    prompt = random_tokens(1, 150, seed=2)
    with enabled(model, "iso3-strict") as state:
        assert state is not None
        torch.manual_seed(3)
        out = model.generate(prompt, max_new_tokens=20, do_sample=True, num_return_sequences=3, output_logits=True,
                             return_dict_in_generate=True)  # fmt: skip
        said = torch.stack(out.logits, 1)
        assert len({tuple(row) for row in out.sequences.tolist()}) == 3
        for row in range(3):
            cache, sequence = state.new_cache(), out.sequences[row : row + 1]
            mask = torch.ones_like(sequence)
            with cache.prefill():
                first = teacher_forced(model, sequence, mask, cache, [150])
            rest = teacher_forced(model, sequence, mask, cache, [1] * 19, start=150)
            assert relative_error(said[row : row + 1], torch.cat([first[:, -1:], rest], 1)) < 1e-4


@pytest.mark.parametrize(
    ("kv", "drop"),
    [
        *((STRICT3, drop) for drop in (1, 5, 82, 83, 84, 120, 212)),
        *((LOSSLESS, drop) for drop in (5, 51, 52, 53, 84, 85, 212)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_crop_then_other_tokens_equals_a_fresh_run(model: PreTrainedModel, kv: KVCacheConfig, drop: int) -> None:
    """212 tokens: the tail begins at 160, so the cut lies in it, in an open or a sealed block, or at an edge."""
    ids, other = random_tokens(1, 212), random_tokens(1, 30, seed=7)
    kept = 212 - drop
    with enabled(model, kv) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(ids, cache=cache)
        if drop:
            cache.crop(-drop)
        assert cache.get_seq_length() == kept
        sequence = torch.cat([ids[:, :kept], other], 1)
        mask = torch.ones_like(sequence)
        if kept == 0:
            with cache.prefill():
                got = teacher_forced(model, sequence, mask, cache, [1])
            got = torch.cat([got, teacher_forced(model, sequence, mask, cache, [1] * 29, start=1)], 1)
        else:
            got = teacher_forced(model, sequence, mask, cache, [1] * 30, start=kept)
        fresh = state.new_cache()
        with fresh.prefill():
            head = teacher_forced(model, sequence, mask, fresh, [max(kept, 1)])
        rest = 30 if kept else 29
        want = teacher_forced(model, sequence, mask, fresh, [1] * rest, start=max(kept, 1))
        if kept == 0:
            want = torch.cat([head, want], 1)
    assert relative_error(got, want) < 1e-4


def test_crop_refuses_a_positive_count(model: PreTrainedModel) -> None:
    with enabled(model, "iso3") as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        model(random_tokens(1, 5), cache=cache)
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)


def test_the_callers_options_serve_a_second_model() -> None:
    """One options dict and one GenerationConfig for a model of 2 layers and one of 4."""
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    config = GenerationConfig(max_new_tokens=6, do_sample=False, num_beams=2)
    before, config_before = copy.deepcopy(options), config.to_json_string()
    for layers in (2, 4):
        model = tiny(num_hidden_layers=layers)
        ids = random_tokens(1, 20)
        want = model.generate(ids, **options)
        with enabled(model, LOSSLESS_STRICT) as state:
            assert torch.equal(model.generate(ids, **options), want)
            assert torch.equal(model.generate(ids, generation_config=config), want)
            assert state is not None
            assert state.cache is not None
            assert len(state.cache.layers) == layers
    assert options == before
    assert config.to_json_string() == config_before


def test_a_reset_cache_starts_over(model: PreTrainedModel) -> None:
    ids = random_tokens(1, 150)
    with enabled(model, dataclasses.replace(STRICT3, name="reset")) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        want = model(ids, cache=cache).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, cache=cache).logits, want)
