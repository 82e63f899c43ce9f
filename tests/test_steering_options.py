"""Steering by α, by an additive vector, on shared weights; what is said and scored under it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import ENCODERS, prompts
from test_power import mamba
from test_steering import TEXTS, Words, direction, steer, unchanged, untouched, weights
from torch import Tensor
from zoo import ARCHITECTURES, tiny

from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.model import ModelView
from tl_spectral.model.edits import output_weight_plus
from tl_spectral.model.passes import Rerun
from tl_spectral.ov import ov_circuits
from tl_spectral.steering import SteeringReport


def log_probs(model: Any, text: Tensor) -> Tensor:
    with torch.no_grad():
        return model(text[None])[0].double().log_softmax(-1)


# ---------------------------------------------------------------------- running again


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_rerun_is_the_whole_model(name: str) -> None:
    """Bit for bit, under an edit and with a vector added; kills: a stale or unshifted state."""
    model, text = tiny(name), TEXTS[0]
    view = ModelView(model)
    with untouched(model):
        vector = direction(4)
        for layer in (0, 2):
            again = Rerun(view, text, layer)
            assert again._replays
            assert torch.equal(again.log_probs, log_probs(model, text))
            assert torch.equal(again.edited()[0], again.log_probs)
            shifted, states = again.shifted(vector)
            with torch.no_grad():
                expected = model.run_with_hooks(
                    text[None],
                    fwd_hooks=[(f"blocks.{layer}.hook_out", lambda x, hook: x + vector)],
                )
            assert torch.equal(shifted, expected[0].double().log_softmax(-1))
            torch.testing.assert_close(states, again.states + vector.double())
            with steer(model, direction(), layer=layer, texts=TEXTS, controls=0):
                edited, states = again.edited()
                assert torch.equal(edited, log_probs(model, text))
                assert not torch.equal(edited, again.log_probs)
                _, cache = model.run_with_cache(text[None])
                post = cache[f"blocks.{layer}.hook_out"].detach().reshape(len(text), -1)
                assert torch.equal(states, post.double())


def test_a_rerun_that_cannot_replay_runs_the_whole_model(gpt2: Any) -> None:
    again = Rerun(ModelView(gpt2), TEXTS[0], 1)
    vector = direction(4)
    replayed = again.shifted(vector)
    again._replays = False
    whole = again.shifted(vector)
    assert torch.equal(whole[0], replayed[0])
    assert torch.equal(whole[1], replayed[1])
    assert torch.equal(again.edited()[0], again.log_probs)
    assert all("forward" not in vars(block) for block in gpt2.blocks)


# ---------------------------------------------------------------------- α, and a vector added


@pytest.mark.parametrize("method", ["weights", "hook"])
def test_alpha_is_the_other_way_to_say_the_gap(method: str) -> None:
    model = tiny("llama")
    with steer(model, direction(), gap=4.0, method=method, texts=TEXTS, controls=0) as by_gap:
        pass
    alpha = by_gap.alpha
    with steer(model, direction(), alpha=alpha, method=method, texts=TEXTS, controls=0) as by_alpha:
        pass
    assert (by_alpha.alpha, by_alpha.gap) == (alpha, by_gap.gap)
    assert by_alpha.to_dataframe().equals(by_gap.to_dataframe())
    with steer(model, direction(), texts=TEXTS, method=method, controls=0) as neither:
        assert neither.gap == pytest.approx(5, rel=1e-5)


def test_an_alpha_too_small_to_dominate_is_said() -> None:
    model = tiny("gpt2")
    with steer(model, direction(), alpha=1e-3, texts=TEXTS, controls=0) as report:
        principal = ov_circuits(model).principal(2)
    assert report.gap == pytest.approx(principal.gap, rel=1e-5)
    assert report.eigenvalue == pytest.approx(principal.eigenvalue, rel=1e-4)
    assert any("not the dominant mode" in note for note in report.notes)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert", "albert"])
def test_additive_vector(name: str) -> None:
    """``α · mean ‖resid_post‖ · w`` at every position, and nothing else."""
    model, w = tiny(name), direction()
    clean = [model.run_with_cache(text[None])[1] for text in TEXTS]
    states = torch.cat([c["blocks.1.hook_out"].detach().reshape(-1, 24).double() for c in clean])
    shift = 0.5 * states.norm(dim=1).mean() * (w / w.norm()).double()
    with untouched(model):
        with torch.no_grad():
            expected = model.run_with_hooks(
                TEXTS[0][None],
                fwd_hooks=[("blocks.1.hook_out", lambda x, hook: x + shift.float())],
            )
        with steer(model, w, 1, method="additive", alpha=0.5, texts=TEXTS) as report:
            torch.testing.assert_close(model(TEXTS[0][None]), expected, atol=1e-5, rtol=1e-5)
    table = report.to_dataframe().set_index("condition")
    assert list(table.index) == ["original", "steered", "random direction 0", "random direction 1"]
    after = states + shift
    cosines = after @ report.direction / after.norm(dim=1)
    assert report.alignment_after == pytest.approx(cosines.abs().mean().item(), abs=1e-5)
    assert (table["strength"].iloc[1:] - shift.norm().item()).abs().max() < 1e-4
    nothing = ("gap", "gap_before", "eigenvalue", "reach", "relative_edit", "read_direction")
    assert [getattr(report, name) for name in nothing] == [None] * 6


def test_additive_vector_needs_no_value_weights() -> None:
    model = mamba()
    with pytest.raises(UnsupportedModelError, match="value and output weights"):
        steer(model, direction(d=model.cfg.d_model), method="hook")
    text = prompts(1, 6) % model.cfg.d_vocab
    before = model(text)
    w = direction(d=model.cfg.d_model)
    with steer(model, w, method="additive", alpha=0.5, texts=text) as report:
        assert not torch.equal(model(text), before)
    assert report.kl > 0
    assert torch.equal(model(text), before)


# ---------------------------------------------------------------------- shared weights


def tied() -> Any:
    """A GPT-2 whose last two layers have one W_O."""
    model = tiny("gpt2")
    shared = model.blocks[1].attn.o.original_component.weight
    model.blocks[2].attn.o.original_component.weight = shared
    return model


@pytest.mark.parametrize("build", [tied, lambda: tiny("albert")], ids=["gpt2", "albert"])
def test_shared_weight_is_edited_in_one_layer_only(build: Any) -> None:
    """Kills: writing the stored weight, which steers every layer that uses it."""
    model = build()
    before, text = weights(model), TEXTS[0][None]
    seen: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> None:
        seen[hook.name] = x.detach().clone()

    names = [f"blocks.{layer}.attn.{what}" for layer in (1, 2) for what in ("hook_in", "hook_out")]
    hooks = [(name, keep) for name in names]
    model.run_with_hooks(text, fwd_hooks=hooks)
    clean = dict(seen)
    with untouched(model):
        with steer(model, direction(), 2, texts=TEXTS, controls=0) as report:
            assert unchanged(model, before)
            model.run_with_hooks(text, fwd_hooks=hooks)
        assert report.shared_weight
        assert any("not written" in note for note in report.notes)
        for name in names[:3]:
            assert torch.equal(seen[name], clean[name]), name
        assert (seen[names[3]] - clean[names[3]]).norm() > 0.1
    alone = tiny("gpt2")
    with steer(alone, direction(), texts=TEXTS, controls=0) as report:
        assert not report.shared_weight


def test_hook_of_a_shared_weight_does_what_the_weight_would() -> None:
    """The same edit on a model whose layers have the same W_O, but each its own."""
    shared, apart = tied(), tied()
    own = apart.blocks[1].attn.o.original_component.weight
    apart.blocks[2].attn.o.original_component.weight = torch.nn.Parameter(own.detach().clone())
    delta = torch.randn(24, 24, generator=torch.Generator().manual_seed(0))
    outputs = []
    for model in (shared, apart):
        with output_weight_plus(ModelView(model), 2, delta), torch.no_grad():
            ablate = ("blocks.2.attn.o.hook_in", lambda x, hook: x * 0.5)
            plain = model(TEXTS[0][None])
            outputs.append((plain, model.run_with_hooks(TEXTS[0][None], fwd_hooks=[ablate])))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- every family


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("method", ["weights", "hook"])
def test_every_family_is_steered_and_comes_back(name: str, method: str) -> None:
    model = tiny(name)
    with untouched(model):
        with steer(model, direction(), 0, 20.0, method=method, texts=TEXTS, controls=1) as report:
            pass
        assert report.gap == pytest.approx(20, rel=1e-4)
        assert report.kl > 0
        assert report.shared_weight == (name == "albert" and method == "weights")
        rows = report.to_dataframe()
        assert rows["kl"].notna().all()
        assert rows["perplexity"].notna().all() == (name not in {*ENCODERS, "albert"})


# ---------------------------------------------------------------------- what is said and scored


@pytest.mark.parametrize(("name", "method"), [("gpt2", "weights"), ("gemma2", "hook")])
def test_perplexity_is_that_of_the_next_tokens(name: str, method: str) -> None:
    """Kills: off by one, per-text means averaged, the first token scored."""
    model = tiny(name)

    def nll() -> float:
        scored = [-log_probs(model, text)[torch.arange(len(text) - 1), text[1:]] for text in TEXTS]
        return torch.cat(scored).mean().item()

    clean = nll()
    with steer(model, direction(), method=method, texts=TEXTS) as report:
        steered = nll()
    table = report.to_dataframe().set_index("condition")
    assert table.loc["original", "nll"] == pytest.approx(clean, rel=1e-6)
    assert table.loc["steered", "nll"] == pytest.approx(steered, rel=1e-5)
    assert table.loc["steered", "perplexity"] == pytest.approx(math.exp(steered), rel=1e-5)
    assert abs(steered - clean) > 1e-3
    assert (table["note"] == "").all()


def test_why_there_is_no_perplexity_is_said() -> None:
    for model, texts, reason in (
        (tiny("bert"), TEXTS, "not causal"),
        (tiny("gpt2"), None, "random ids are no text"),
        (tiny("gpt2"), prompts(3, 1), "no text has a second token"),
    ):
        with steer(model, direction(), texts=texts, generate=3, controls=1) as report:
            pass
        table = report.to_dataframe()
        assert table["perplexity"].isna().all()
        assert table["note"].str.contains(reason).all()
        if texts is None or reason == "not causal":
            assert report.generations == ()
            assert any("no generations" in note for note in report.notes)


def test_generation_is_greedy_with_and_without(tmp_path: Any) -> None:
    model = tiny("llama")

    def greedy(text: Tensor, count: int) -> tuple[int, ...]:
        for _ in range(count):
            text = torch.cat([text, log_probs(model, text)[-1].argmax()[None]])
        return tuple(text[-count:].tolist())

    clean = [greedy(text, 6) for text in TEXTS]
    texts = [*TEXTS, TEXTS[0] + 1, TEXTS[1] + 2]
    with steer(model, direction(), gap=20.0, texts=texts, generate=6, controls=0) as report:
        steered = [greedy(text, 6) for text in TEXTS]
    assert len(report.generations) == 3
    assert [entry["before"] for entry in report.generations[:2]] == clean
    assert [entry["after"] for entry in report.generations[:2]] == steered
    assert clean != steered
    assert report.generations[1]["prompt"] == tuple(TEXTS[1].tolist())
    again = SteeringReport.load(report.save(tmp_path / "r"))
    assert again.generations == report.generations
    assert again.eigenvalue == report.eigenvalue


def test_generation_ends_where_the_text_or_the_model_does() -> None:
    model, text = tiny("gpt2"), prompts(1, 28)
    with steer(model, direction(), texts=text, generate=20, controls=0) as report:
        pass
    assert len(report.generations[0]["before"]) == 4  # the model takes 32
    model.tokenizer = Words()
    model.tokenizer.eos_token_id = report.generations[0]["before"][0]
    with steer(model, direction(), texts=text, generate=20, controls=0) as report:
        pass
    assert report.generations[0]["before"] == Words().decode([model.tokenizer.eos_token_id])
    with steer(model, direction(), texts=text, generate=0, controls=0) as report:
        assert report.generations == ()


def test_sides_are_told_apart() -> None:
    """Kills: sides taken after the edit, or alignment of all tokens given for both."""
    model = tiny("gpt2")
    w = direction()

    def cosines() -> Tensor:
        runs = [model.run_with_cache(text[None])[1]["blocks.2.hook_out"][0] for text in TEXTS]
        states = torch.cat(runs).detach().double()
        return states @ w.double() / (states.norm(dim=1) * w.norm())

    before = cosines()
    with steer(model, w, texts=TEXTS, controls=0) as report:
        after = cosines()
    steered = report.conditions[1]
    for side, mask in (("plus", before > 0), ("minus", before < 0)):
        assert mask.any()
        mean = after[mask].abs().mean().item()
        assert steered[f"alignment_{side}"] == pytest.approx(mean, abs=1e-5)
    lone = prompts(1, 1)
    with steer(model, w, texts=lone, controls=0) as report:
        row = report.conditions[1]
    assert [row["alignment_plus"], row["alignment_minus"]].count(None) == 1
    assert "no token began on the" in row["note"]
    assert (row["alignment_se"], row["kl_se"]) == (None, None)


def test_error_is_that_of_whole_texts() -> None:
    """Ratio estimator by hand: tokens of a text go together."""
    model = tiny("gpt2")
    with steer(model, direction(), texts=TEXTS, controls=0) as report:
        pass
    states = [model.run_with_cache(t[None])[1]["blocks.2.hook_out"][0].double() for t in TEXTS]
    cosines = [(s @ report.direction / s.norm(dim=1)).abs().detach() for s in states]
    mean = torch.cat(cosines).mean()
    off = torch.stack([(c - mean).sum() for c in cosines])
    expected = (2 * (off**2).sum()).sqrt().item() / 14
    assert report.conditions[0]["alignment_se"] == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gap": 3.0, "alpha": 2.0}, "not both"),
        ({"method": "additive", "gap": 3.0}, "has no gap"),
        ({"method": "additive"}, "Give alpha"),
        ({"method": "magic"}, "method must be weights, hook or additive, got 'magic'"),
        ({"alpha": 0.0}, "alpha must be a positive number, got 0.0"),
        ({"alpha": -1.0}, "negate the direction"),
        ({"alpha": math.nan}, "got nan"),
        ({"alpha": math.inf}, "got inf"),
        ({"generate": -1}, "generate must be a whole number"),
        ({"texts": torch.tensor([[70]])}, "outside 0 to 63"),
    ],
)
def test_options_are_refused_at_once(options: dict[str, Any], match: str, gpt2: Any) -> None:
    with untouched(gpt2), pytest.raises(InputError, match=match):
        steer(gpt2, direction(), **options)


def test_alpha_costs_few_spectra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a secant that gets lost, and leaves its work to the bracket."""
    from tl_spectral.steering import alpha as module

    counted: list[int] = []
    eigenvalues = module._eigenvalues

    def spied(F: Tensor) -> Tensor:
        counted.append(1)
        return eigenvalues(F)

    monkeypatch.setattr(module, "_eigenvalues", spied)
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(40, 40, generator=generator, dtype=torch.float64) / 40**0.5
    w = torch.nn.functional.normalize(direction(1, 40).double(), dim=0)
    solver = module.GapSolver(F, w, w, True)
    for gap in (2.0, 5.0, 20.0):
        solver.alpha(gap)
    assert len(counted) <= 1 + 3 * 6
