"""Measurements away from the CPU: every tensor follows the model, and little comes back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant.evals import fidelity
from rotaryquant.evals.facts import collect
from rotaryquant.evals.peers import parse_specs, peers
from rotaryquant.evals.simulated import Facts, Place
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.checkpoints import Loaded
from support.commands import Run
from support.elsewhere import ELSEWHERE, NAME, MixedDevicesError, elsewhere
from support.kernels import force_kernel
from support.models import tiny
from support.tiny_llm import byte_tokenizer, save_tiny

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60
PEERS = sorted(peers())


@pytest.fixture(autouse=True)
def _one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own kernels round otherwise; what runs elsewhere must equal the same steps here."""
    force_kernel(monkeypatch, "reference")


def rows_of(count: int, width: int) -> Tensor:
    return torch.randn(2, count, width, generator=torch.Generator().manual_seed(7))


def place_on(device: torch.device, width: int = 64) -> Place:
    mixed = rows_of(width, width) * torch.logspace(0, -2, width)[:, None]
    parts = (rows_of(256, width), rows_of(256, width), mixed.transpose(-1, -2) @ mixed, mixed.transpose(-1, -2) @ mixed)
    return Place(5, 12, 2, width, Facts(*(part.to(device) for part in parts)), device)


@pytest.mark.parametrize("bits", [None, 2, 8])
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_follows_its_rows(name: str, bits: int | None) -> None:
    """Keys and values, as published and at other widths, with nothing left on the CPU; and the same as there."""
    peer, rows = peers()[name], rows_of(160, 64)

    def rebuilt(device: torch.device) -> list[Tensor]:
        place = place_on(device)
        assert peer.at is not None
        codec = peer.make(place) if bits is None else peer.at(place, bits)
        found = [codec.keys(rows.to(device)), codec.values(rows.to(device))]
        assert all(part.device == device for part in found)
        return [part.cpu() for part in found]

    here = rebuilt(torch.device("cpu"))
    with elsewhere():
        there = rebuilt(ELSEWHERE)
    for got, wanted in zip(there, here, strict=True):
        assert torch.equal(got, wanted)


def test_a_tensor_left_on_the_cpu_is_found() -> None:
    with elsewhere():
        x = torch.arange(3, device=ELSEWHERE)
        assert (x + 1 + torch.tensor(2)).tolist() == [3, 4, 5]
        for left in (torch.zeros, torch.ones, torch.empty, torch.randn):
            with pytest.raises(MixedDevicesError, match=r"a tensor \(3,\) of the CPU"):
                x * left(3)
        with pytest.raises(MixedDevicesError):
            x[torch.tensor([0, 1])]
        assert x.cpu().device.type == "cpu"
        with pytest.raises(MixedDevicesError):
            x * x.cpu()


def measured(specs: list[str], device: torch.device) -> dict[str, Any]:
    model = tiny(max_position_embeddings=2048).to(device)  # type: ignore[arg-type]
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    windows, _ = windows_of(loaded, TEXT, 512, 200)
    assert windows[0].device == device
    kinds = parse_specs(specs)
    exact, found = fidelity.measure(loaded, kinds, windows)
    counts = [len(ids) - 1 - len(ids) // 2 for ids in windows]
    assert all(part.device.type == "cpu" for one in found.values() for part in (*one.divergence, *one.agree))
    return {name: fidelity.result_of(one, exact, counts) for name, one in found.items()}


@pytest.mark.parametrize(
    "spec",
    [
        "fp16",
        "turbo3-qjl,sinks=4,tail=48",
        "iso3-strict,mean=off",
        "iso3,mean=off",
        "iso3",
    ],
)
def test_scores_elsewhere_are_those_of_the_cpu(spec: str) -> None:
    with elsewhere():
        there = measured([spec], ELSEWHERE)[spec]
    here = measured([spec], torch.device("cpu"))[spec]
    assert there.pop("in_force") == here.pop("in_force")
    assert there == pytest.approx(here, rel=1e-3, abs=1e-6)


def test_scores_come_back_and_logits_do_not() -> None:
    """Of every scored position a divergence and an agreement, beside what the path itself asks."""
    with elsewhere() as device:
        before = device.fetched
        rows = measured(["fp16"], ELSEWHERE)
        fetched = device.fetched - before
    positions = rows["fp16"]["tokens"]
    assert 2 * positions < fetched < 4 * positions


def test_facts_of_a_calibration_text_stay_with_the_model() -> None:
    def found(device: torch.device) -> dict[int, Facts]:
        model = tiny(max_position_embeddings=2048).to(device)  # type: ignore[arg-type]
        return collect(Loaded("tiny", Path(), model, byte_tokenizer()), TEXT, 1024)

    with elsewhere():
        there = found(ELSEWHERE)
        for layer, one in found(torch.device("cpu")).items():
            for name, wanted in vars(one).items():
                got = getattr(there[layer], name)
                assert (got is None) == (wanted is None)
                assert wanted is None or (got.device == ELSEWHERE and torch.equal(got.cpu(), wanted))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (folder / "text.txt").write_text(TEXT)
    return folder


COMMANDS = {
    "fidelity": "--kv int4 --kv iso3-strict,mean=off --text TEXT --context 512 --tokens 200 --any-baseline",
    "perplexity": "--kv iso3-strict,mean=off --text TEXT --context 512 --tokens 200",
    "ablate": "--kv iso3-strict,mean=off --parts inverse --text TEXT --context 512 --tokens 200 --any-baseline",
    "needle": "--kv iso3-strict,mean=off --text TEXT --context 1700 --questions 1 --depths 50",
    "ruler": "--kv int8 --text TEXT --context 1500 --questions 1 --tasks multi-value --form cloze",
    "gate": "--kv int8 --tokens 2 --repetition 1 --divergence 100",
    "stability": "--kv iso3-strict,mean=off --text TEXT --context 512 --tokens 200 --steps 2 --reloads 2",
    "soak": "--kv fp16 --text TEXT --longest 600 --seconds 0.1",
    "profile": "--kv iso3-strict,mean=off --context 140 --steps 2",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_measurement_runs_elsewhere_and_says_so(
    name: str, folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 2_000_000)
    words = COMMANDS[name].replace("TEXT", str(folder / "text.txt")).split()
    with elsewhere() as device:
        words += ["--device", ELSEWHERE.type, "--json", "-o", str(tmp_path / "report")]
        status, out, err = run("eval", name, str(folder), *words)
    assert status == (1 if name in ("needle", "ruler") else 0), err  # of so few questions no cell counts
    data = json.loads(out)
    assert data["device"] == NAME
    assert (tmp_path / "report.md").read_text().startswith(f"{NAME}, {data['machine']}, ")
    assert device.fetched > 0
    assert (len(waited) > 0) == (name == "profile")
    assert (data.get("device_mb_end") == 2.0) == (name == "soak")


def test_sensitivities_elsewhere_are_those_of_the_cpu(folder: Path, run: Run, tmp_path: Path) -> None:
    words = ["--kv", "iso3-strict,mean=off", "--context", "512", "--tokens", "200", "--any-baseline", "--json"]
    found = []
    with elsewhere() as there:
        for device in (ELSEWHERE.type, "cpu"):
            text, side, before = str(folder / "text.txt"), str(tmp_path / device), there.fetched
            status, out, err = run("calibrate", str(folder), *words, "--text", text, "-o", side, "--device", device)
            assert status == 0, err
            assert (there.fetched > before) == (device != "cpu")
            streams = [layer[which] for layer in json.loads(out)["layers"] for which in ("keys", "values")]
            found.append([cost for stream in streams for cost in (*stream["plain"], *stream["fitted"])])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert min(found[0]) > 0
