"""Steering: the edit is what it says, what it says it does is so, and it leaves no trace."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from oracles import prompts
from test_plots import overlap, panels
from test_power import mamba
from torch import Tensor
from zoo import ARCHITECTURES, tiny

from tl_spectral.errors import (
    InputError,
    ModelStateError,
    ProvenanceError,
    TLSpectralWarning,
    UnsupportedModelError,
)
from tl_spectral.model.edits import _stacks
from tl_spectral.ov import ov_circuits
from tl_spectral.power import power_alignment, simulate_power
from tl_spectral.steering import SteeringReport
from tl_spectral.steering import steer as steer_and_generate
from tl_spectral.steering.alpha import GapSolver

TEXTS = [prompts(1, 9)[0], prompts(1, 5)[0] + 1]
steer = partial(steer_and_generate, generate=0)  # continuations have their own tests


def direction(seed: int = 0, d: int = 24) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unchanged(model: Any, before: dict[str, Tensor]) -> bool:
    now = dict(model.named_parameters())
    return set(now) == set(before) and all(torch.equal(now[n], before[n]) for n in before)


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Weights and logits are bit for bit the same afterwards, and nothing is remembered."""
    before, logits = weights(model), model(TEXTS[0][None])
    yield
    assert unchanged(model, before)
    assert torch.equal(model(TEXTS[0][None]), logits)
    assert not _stacks


# ---------------------------------------------------------------------- the edit


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "albert"])
def test_edit_of_the_weights(name: str) -> None:
    """Kills: W_O transposed, the wrong layer, α from another gap, weights not put back."""
    model, w = tiny(name), direction()
    F = [ov_circuits(model).layer_matrix(layer) for layer in range(3)]
    with untouched(model), steer(model, w, layer=1, gap=3.0, texts=TEXTS, controls=0) as report:
        inside = ov_circuits(model)
        change = report.alpha * torch.outer(report.direction, report.read_direction)
        torch.testing.assert_close(inside.layer_matrix(1) - F[1], change, atol=1e-5, rtol=1e-4)
        assert torch.equal(inside.layer_matrix(0), F[0])
        assert torch.equal(inside.layer_matrix(2), F[2])
        mode = inside.principal(1)
        assert mode.gap == pytest.approx(3.0, rel=1e-4)
        assert report.gap == pytest.approx(3.0, rel=1e-5)
        assert mode.eigenvalue.real == pytest.approx(report.eigenvalue.real, rel=1e-4)
        cosine = (mode.subspace[:, 0] @ report.direction).abs().item()
        assert cosine == pytest.approx(report.eigenvector_cosine, abs=1e-4)
        assert cosine > 0.95
        torch.testing.assert_close(report.direction, (w / w.norm()).double())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hook_adds_what_it_says_and_touches_no_weight(name: str) -> None:
    model = tiny(name)
    before = weights(model)
    _, clean = model.run_with_cache(TEXTS[0][None])
    with (
        untouched(model),
        steer(model, direction(), layer=1, method="hook", texts=TEXTS, controls=0) as report,
    ):
        assert unchanged(model, before)
        model.reset_hooks()  # a user's habit; the edit outlives it
        seen: list[Tensor] = []
        model.run_with_hooks(
            TEXTS[0][None],
            fwd_hooks=[("blocks.2.hook_in", lambda x, hook: seen.append(x.detach()))],
        )
        post = []
        handle = model.blocks[1].attn.o.register_forward_hook(lambda m, i, o: post.append(o))
        model(TEXTS[0][None])
        handle.remove()
        x = clean["blocks.1.attn.hook_in"].reshape(9, -1)
        w = report.direction.float()
        expected = clean["blocks.1.attn.o.hook_out"].reshape(9, -1) + torch.outer(
            x @ (report.alpha * w), w
        )
        torch.testing.assert_close(post[0].reshape(9, -1), expected, atol=1e-4, rtol=1e-4)
        assert (seen[0].reshape(9, -1) - clean["blocks.2.hook_in"].reshape(9, -1)).norm() > 0.1
    assert report.reach == pytest.approx(1)
    assert report.relative_weight_edit is None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("gap", [1.1, 2.0, 20.0])
def test_alpha_meets_the_gap(skip: bool, gap: float) -> None:
    """Against eigenvalues of the edited matrix; r is not w, as with grouped heads."""
    generator = torch.Generator().manual_seed(4)
    for size in (0.2, 1.0, 5.0):
        F = size * torch.randn(20, 20, generator=generator, dtype=torch.float64) / 20**0.5
        w = torch.randn(20, generator=generator, dtype=torch.float64)
        w /= w.norm()
        r = w.clone()
        r[:12] = 0
        alpha = GapSolver(F, w, r, skip).alpha(gap)
        assert alpha > 0
        values = torch.linalg.eigvals(F + alpha * torch.outer(w, r))
        strengths = (values + skip).abs().sort(descending=True).values
        assert (strengths[0] / strengths[1]).item() == pytest.approx(gap, rel=1e-4)
        assert strengths[0] / strengths[1] >= gap


def test_reach_is_what_the_value_map_reads() -> None:
    """Llama's two value heads of six dimensions read 12 of 24; the rest is out of reach."""
    model, w = tiny("llama"), direction(3)
    basis, _ = torch.linalg.qr(ov_circuits(model).W_V[2, ::2].double().transpose(0, 1).flatten(1))
    reach = (basis.T @ (w / w.norm()).double()).norm().item() ** 2
    with steer(model, w, cutoff=0.0, texts=TEXTS, controls=0) as report:
        assert report.reach == pytest.approx(reach, rel=1e-6)
        assert 0.1 < report.reach < 0.9
    blind = w.double() - basis @ (basis.T @ w.double())
    with pytest.raises(InputError, match="Use method='hook'"):
        steer(model, blind)
    with steer(model, blind, method="hook", texts=TEXTS, controls=0) as report:
        assert report.gap == pytest.approx(5, rel=1e-5)


def test_cutoff_trades_reach_for_a_smaller_edit() -> None:
    model = tiny("pythia")
    reports = []
    for cutoff in (0.0, 0.05, 0.3):
        with steer(model, direction(), cutoff=cutoff, texts=TEXTS, controls=0) as report:
            reports.append(report)
    reach = [report.reach for report in reports]
    edit = [report.relative_weight_edit for report in reports]
    assert reach == sorted(reach, reverse=True)
    assert edit == sorted(edit, reverse=True)
    assert edit[0] > 5 * edit[1]


def test_steered_dynamics_split_into_plus_and_minus() -> None:
    """In the paper's dynamics tokens end at ±w by the side on which they start."""
    model = tiny("gpt2")
    with steer(model, direction(), method="weights", texts=TEXTS, controls=0) as report:
        r = simulate_power(model, layers=[2], attention="identity", steps=60, n_tokens=40)
        x0 = torch.randn(40, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (r.kind, r.agrees) == ("bipartite", True)
    cosines = r.final @ report.direction
    assert cosines.abs().min() > 0.95
    side = (x0 @ report.read_direction).sign()
    assert (cosines.sign() == side).double().mean() > 0.9


# ---------------------------------------------------------------------- no trace


def test_restored_after_an_exception() -> None:
    model = tiny("gpt2")
    for method in ("weights", "hook"):
        with (
            untouched(model),
            pytest.raises(KeyError),
            steer(model, direction(), method=method, texts=TEXTS, controls=0),
        ):
            raise KeyError


def test_failing_measurement_leaves_no_trace(monkeypatch: Any) -> None:
    from tl_spectral.steering import account as module

    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory")

    model = tiny("gpt2")
    with untouched(model):
        monkeypatch.setattr(module, "_rivals", fail)
        with pytest.raises(RuntimeError, match="no memory"), steer(model, direction()):
            pass


def test_nested() -> None:
    """Kills: an inner edit that restores from, or puts back, the wrong state."""
    model = tiny("llama")
    with untouched(model), steer(model, direction(0), texts=TEXTS, controls=0):
        outer = weights(model)
        with steer(model, direction(1), texts=TEXTS, controls=0) as inner:
            mode = ov_circuits(model).principal(2)
            assert mode.gap == pytest.approx(5, rel=1e-3)
            assert (mode.subspace[:, 0] @ inner.direction).abs() > 0.95
            with steer(model, direction(1), layer=0, method="hook", texts=TEXTS, controls=0):
                model(TEXTS[0][None])
        assert unchanged(model, outer)


@pytest.mark.parametrize("same_storage", [True, False])
def test_two_models_that_share_weights_end_in_any_order(same_storage: bool) -> None:
    """Kills: snapshots taken while another model's edit is in the shared weight."""
    one, two = tiny("llama"), tiny("llama")
    shared = one.blocks[2].attn.o.original_component.weight
    if same_storage:
        shared = torch.nn.Parameter(shared.data)
    two.blocks[2].attn.o.original_component.weight = shared
    with untouched(one), untouched(two):
        first = steer(one, direction(0), texts=TEXTS, controls=0)
        first.__enter__()
        second = steer(two, direction(1), texts=TEXTS, controls=0)
        report = second.__enter__()
        both = ov_circuits(two).layer_matrix(2)
        assert torch.equal(both, ov_circuits(one).layer_matrix(2))
        first.__exit__(None, None, None)
        alone = ov_circuits(two).layer_matrix(2)
        assert not torch.equal(alone, both)
        gc.collect()
        change = report.alpha * torch.outer(report.direction, report.read_direction)
        clean = ov_circuits(tiny("llama")).layer_matrix(2)
        torch.testing.assert_close(alone - clean, change, atol=1e-5, rtol=1e-4)
        second.__exit__(None, None, None)


def test_writes_inside_are_undone_and_grad_modes_do_not_matter() -> None:
    model = tiny("gpt2")
    flags = [p.requires_grad for p in model.parameters()]
    with untouched(model), torch.inference_mode(), steer(model, direction(), texts=TEXTS):
        pass
    with untouched(model), steer(model, direction(), texts=TEXTS), torch.no_grad():
        model.blocks[2].attn.o.original_component.weight.mul_(2)
    assert flags == [p.requires_grad for p in model.parameters()]


def test_model_may_be_moved_inside() -> None:
    """Kills: the old storage restored, and the edit left in the new one."""
    model = tiny("gpt2")
    weight = model.blocks[2].attn.o.original_component.weight
    original = weight.detach().clone()
    with steer(model, direction(), texts=TEXTS, controls=0):
        weight.data = weight.data.double()
    assert torch.equal(weight, original.double())


def test_half_precision_comes_back_bit_for_bit() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    with (
        pytest.warns(TLSpectralWarning, match="half precision"),
        untouched(model),
        steer(model, direction(), texts=TEXTS, controls=1) as report,
    ):
        assert report.alignment_after > report.alignment_before + 0.2


def test_compatibility_mode() -> None:
    raw, compat = tiny("gpt2"), tiny("gpt2")
    compat.enable_compatibility_mode()
    mode = next(m for m in map(ov_circuits(raw).principal, range(3)) if m.kind == "real")
    with pytest.raises(ProvenanceError, match="weights is 'compat'"):
        steer(compat, mode)
    with untouched(raw), steer(raw, mode, texts=TEXTS, controls=0) as report:
        assert (report.direction @ mode.subspace[:, 0]).abs() == pytest.approx(1)
    with untouched(compat), steer(compat, direction(), texts=TEXTS, controls=0):
        assert ov_circuits(compat).principal(2).gap == pytest.approx(5, rel=1e-4)
    with (
        pytest.raises(ModelStateError, match="folded the edit into its weights"),
        steer(raw, direction(), texts=TEXTS, controls=0),
    ):
        raw.enable_compatibility_mode()
    assert not _stacks


def test_stale_plan_is_refused() -> None:
    model = tiny("gpt2")
    plan = steer(model, direction(), texts=TEXTS, controls=0)
    with torch.no_grad():
        model.blocks[2].attn.o.original_component.weight.mul_(2)
    with pytest.raises(ModelStateError, match="Call it again"), plan:
        pass


# ---------------------------------------------------------------------- the report


@pytest.mark.parametrize(("name", "method"), [("gpt2", "weights"), ("opt", "hook")])
def test_figures_are_those_of_the_steered_model(name: str, method: Any, model_of: Any) -> None:
    """Kills: KL the other way round, before and after swapped, another layer's states."""
    model = model_of(name)

    def run(text: Tensor) -> tuple[Tensor, Tensor]:
        logits, cache = model.run_with_cache(text[None])
        states = cache["blocks.1.hook_out"].detach().reshape(len(text), -1).double()
        return logits[0].detach().double().log_softmax(-1), states

    clean = [run(text) for text in TEXTS]
    with steer(model, direction(), layer=1, method=method, texts=TEXTS) as report:
        steered = [run(text) for text in TEXTS]
    kl, cosines = [], {"original": [], "steered": []}
    for (p, x), (q, y) in zip(clean, steered, strict=True):
        kl.append((p.exp() * (p - q)).sum(-1))
        for key, states in (("original", x), ("steered", y)):
            cosines[key].append(states @ report.direction / states.norm(dim=-1))
    old, new = (torch.cat(cosines[key]) for key in ("original", "steered"))
    assert report.kl == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
    assert report.alignment_before == pytest.approx(old.abs().mean().item(), abs=1e-6)
    assert report.alignment_after == pytest.approx(new.abs().mean().item(), abs=1e-5)
    assert report.alignment_after > report.alignment_before + 0.1
    assert report.follows_sign == pytest.approx((old.sign() == new.sign()).double().mean().item())
    table = report.to_dataframe().set_index("condition")
    assert table.loc["steered", "positive"] == pytest.approx((new > 0).double().mean().item())
    top = report.top_tokens[0]
    assert top["before"][0][0] == clean[0][0][-1].argmax().item()
    assert top["after"][0][1] == pytest.approx(steered[0][0][-1].max().exp().item(), rel=1e-4)
    assert report.n_tokens == 14


def test_controls() -> None:
    model = tiny("llama")
    with steer(model, direction(), texts=TEXTS) as report:
        pass
    table = report.to_dataframe().set_index("condition")
    assert list(table.index) == [
        "original", "steered", "additive at equal KL", "random direction 0", "random rank-1 0",
        "random direction 1", "random rank-1 1",
    ]  # fmt: skip
    assert table.loc["additive at equal KL", "kl"] == pytest.approx(report.kl, rel=0.02)
    assert table.loc["original", "kl"] == 0
    assert (table["kl"].drop("original") > 0).all()
    # one linear step of random tokens: only the edit towards w aligns them with w
    drawn = table["random_alignment"]
    assert drawn["steered"] > 0.55
    others = drawn.drop(["steered", "additive at equal KL"])
    assert (others < 0.35).all()
    assert drawn["original"] == pytest.approx(table["chance"].iloc[0], abs=0.1)


def test_random_controls_are_as_large_as_the_edit(monkeypatch: Any) -> None:
    from tl_spectral.steering import edit as module

    model = tiny("llama")
    W_V = ov_circuits(model).W_V[2].double().transpose(0, 1).flatten(1)
    sizes = []
    plus = module.output_weight_plus

    def recorded(view: Any, layer: int, delta: Tensor) -> Any:
        sizes.append((W_V @ delta).norm().item())
        return plus(view, layer, delta)

    monkeypatch.setattr(module, "output_weight_plus", recorded)
    with steer(model, direction(), texts=TEXTS) as report:
        size = report.alpha * report.read_direction.norm().item()
    assert len(sizes) == 6  # measured, four controls, and the edit that is left in place
    assert sizes == pytest.approx([size] * 6, rel=1e-6)


def test_additive_vector_at_equal_kl_is_that_vector() -> None:
    model, w = tiny("gpt2"), direction()
    with steer(model, w, texts=TEXTS) as report:
        pass
    row = report.to_dataframe().set_index("condition").loc["additive at equal KL"]
    shift = (row["strength"] * report.direction).float()
    kl = []
    for text in TEXTS:
        p = model(text[None])[0].double().log_softmax(-1)
        q = model.run_with_hooks(
            text[None], fwd_hooks=[("blocks.2.hook_out", lambda x, hook: x + shift)]
        )
        kl.append((p.exp() * (p - q[0].double().log_softmax(-1))).sum(-1))
    assert torch.cat(kl).mean().item() == pytest.approx(row["kl"], rel=1e-3)


def test_same_seed_same_report(tmp_path: Any) -> None:
    model = tiny("gpt2")
    tables = []
    for seed in (0, 0, 1):
        with steer(model, direction(), seed=seed) as report:
            tables.append(report.to_dataframe())
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])
    assert report.tokens == "random ids"
    again = SteeringReport.load(report.save(tmp_path / "r"))
    assert again.to_dataframe().equals(report.to_dataframe())
    assert again.top_tokens == report.top_tokens
    assert [trace.name for trace in again.plot().data][:2] == ["original", "steered"]


def test_figures_have_their_panels_in_place_on_wide_and_narrow_pages() -> None:
    """The rules that the builders of the report keep (see test_plots)."""
    model = tiny("gpt2")
    with steer(model, direction(), texts=TEXTS) as report:
        pass
    figures = [report.plot(), power_alignment(model, TEXTS).plot()]
    figures += [simulate_power(model).plot(), simulate_power(model, layers=[1]).plot()]
    for figure in figures:
        count = len({trace.xaxis or "x" for trace in figure.data})
        for layout in (figure.layout.to_plotly_json(), figure.layout.meta["narrow"]):
            boxes = panels(layout, count)
            assert all(0 <= low < high <= 1 for box in boxes for low, high in box)
            for i, one in enumerate(boxes):
                assert not any(overlap(one, other) for other in boxes[i + 1 :])


# ---------------------------------------------------------------------- directions and refusals


class Words:
    """A tokenizer of single letters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) - 97 for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_directions() -> None:
    model = tiny("llama")
    W_U = model.unembed.W_U.detach().double()
    with steer(model, 7, texts=TEXTS, controls=0) as report:
        torch.testing.assert_close(report.direction, W_U[:, 7] / W_U[:, 7].norm())
    with pytest.raises(InputError, match="no tokenizer"):
        steer(model, "h")
    model.tokenizer = Words()
    with steer(model, "h", texts=TEXTS, controls=0) as report:
        torch.testing.assert_close(report.direction, W_U[:, 7] / W_U[:, 7].norm())
        assert report.source == "token 'h'"
        assert isinstance(report.top_tokens[0]["after"][0][0], str)
    with pytest.raises(InputError, match=r"'hi' is 2 tokens \['h', 'i'\]"):
        steer(model, "hi")
    towards, away = prompts(2, 6), prompts(3, 4) - 1
    states = [model.run_with_cache(t)[1]["blocks.1.hook_out"][:, -1] for t in (towards, away)]
    contrast = (states[0].mean(0) - states[1].mean(0)).detach().double()
    with steer(model, (towards, away), layer=1, texts=TEXTS, controls=0) as report:
        torch.testing.assert_close(
            report.direction, contrast / contrast.norm(), atol=1e-5, rtol=1e-5
        )


def test_refusals_come_at_once(gpt2: Any) -> None:
    """On calling, not on entering; and the model stays as it is."""
    w = direction()
    with untouched(gpt2):
        for match, arguments in {
            "zero or not finite": (torch.zeros(24),),
            "points nowhere": (torch.full((24,), math.nan),),
            r"shape \(23,\)": (torch.ones(23),),
            r"shape \(24, 1\)": (torch.ones(24, 1),),
            "direction must be": (torch.ones(24, dtype=torch.long),),
            "got dict": ({},),
            "Token 64 does not exist": (64,),
            "layer 3 does not exist": (w, 3),
            "gap must be a number above 1, got 0.0": (w, -1, 0.0),
            "got -2.0": (w, -1, -2.0),
            "got 1.0": (w, -1, 1.0),
            "got inf": (w, -1, math.inf),
        }.items():
            with pytest.raises(InputError, match=match):
                steer(gpt2, *arguments)
        with pytest.raises(InputError, match="controls must be"):
            steer(gpt2, w, controls=-1)
        with pytest.raises(InputError, match="cutoff must lie"):
            steer(gpt2, w, cutoff=1.0)
    rotating = next(
        mode
        for name in ("gpt2", "bert", "llama", "opt", "qwen2")
        for mode in map(ov_circuits(tiny(name)).principal, range(3))
        if mode.kind == "complex"
    )
    model = next(
        m for m in map(tiny, ("gpt2", "bert", "llama", "opt", "qwen2"))
        if m.cfg.model_name == rotating.provenance.model
    )  # fmt: skip
    with pytest.raises(InputError, match="complex mode is a plane"):
        steer(model, rotating)
    with pytest.raises(UnsupportedModelError, match="value and output weights"):
        steer(mamba(), w)
