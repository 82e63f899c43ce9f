"""ALBERT: Hugging Face's numbers exactly, and a block with its own hooks per virtual layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from oracles import prompts
from zoo import HEADS, LAYERS, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.errors import InputError, ModelStateError, TLSpectralWarning, UnsupportedModelError
from tl_spectral.model import ModelView
from tl_spectral.model.albert import HookedAlbert

# hidden, layers, heads, intermediate: the four published sizes
SHAPES = {
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "xlarge": (2048, 24, 16, 8192),
    "xxlarge": (4096, 12, 64, 16384),
}


def small(seed: int = 0, kind: str = "AlbertForMaskedLM", **options: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 64, "embedding_size": 16, "hidden_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 32,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = getattr(tf, kind)(tf.AlbertConfig(**{**shape, **options})).eval()
        for parameter in hf.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return hf


@pytest.mark.parametrize(
    "size",
    [pytest.param(s, marks=[pytest.mark.slow] * (s == "xxlarge")) for s in SHAPES],
)
def test_logits_are_hugging_faces(size: str) -> None:
    hidden, layers, heads, intermediate = SHAPES[size]
    config = tf.AlbertConfig(
        vocab_size=50, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=intermediate, max_position_embeddings=16,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = tf.AlbertForMaskedLM(config).eval()
    hf.set_attn_implementation("eager")
    model = tls.boot_albert(hf)
    tokens = prompts(2, 7) % 50
    with torch.no_grad():
        assert torch.equal(model(tokens), hf(tokens).logits)
    assert len(model.blocks) == model.cfg.n_layers == layers
    assert (model.cfg.d_model, model.cfg.n_heads) == (hidden, heads)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in hf.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_groups": 2},
        {"num_hidden_layers": 3, "num_hidden_groups": 3},
        {"inner_group_num": 2},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_groups_and_activations(options: dict[str, Any]) -> None:
    hf = small(**options)
    hf.set_attn_implementation("eager")
    model = tls.boot_albert(hf)
    tokens = prompts(2, 7)
    assert torch.equal(model(tokens), hf(tokens).logits)
    inner = options.get("inner_group_num", 1)
    assert len(model.blocks) == hf.config.num_hidden_layers * inner
    shared = {id(block.attn.o.weight) for block in model.blocks}
    assert len(shared) == options.get("num_hidden_groups", 1) * inner


def test_padding_segments_and_the_default_attention() -> None:
    hf = small()
    model = tls.boot_albert(hf)
    tokens = prompts(2, 7)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    segments = (torch.arange(7) > 3).long().expand(2, -1)
    asked = {"attention_mask": mask, "token_type_ids": segments}
    torch.testing.assert_close(model(tokens, **asked), hf(tokens, **asked).logits)
    assert not torch.allclose(model(tokens), model(tokens, **asked))
    alone = model(tokens[1:, :4], token_type_ids=segments[1:, :4])
    torch.testing.assert_close(model(tokens, **asked)[1:, :4], alone)


def test_states_are_hugging_faces_layer_by_layer() -> None:
    hf = small()
    hf.set_attn_implementation("eager")
    model = tls.boot_albert(hf)
    tokens = prompts(1, 7)
    seen: list[Any] = []
    layer = hf.albert.encoder.albert_layer_groups[0].albert_layers[0]
    handles = [
        layer.register_forward_hook(lambda m, a, out: seen.append((a[0], out))),
        layer.attention.register_forward_hook(lambda m, a, out: seen.append(out)),
    ]
    hf(tokens)
    for handle in handles:
        handle.remove()
    assert len(seen) == 8  # one layer, applied four times
    _, cache = model.run_with_cache(tokens)
    for i in range(4):
        mid, pattern = seen[2 * i]
        pre, post = seen[2 * i + 1]
        assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], pre)
        assert torch.equal(cache[f"blocks.{i}.hook_resid_mid"], mid)
        assert torch.equal(cache[f"blocks.{i}.hook_resid_post"], post)
        assert torch.equal(cache[f"blocks.{i}.attn.hook_pattern"], pattern)
        assert torch.equal(cache["resid_post", i], post)


def test_either_name_of_a_hook_works() -> None:
    model = tls.boot_albert(small())
    tokens = prompts(1, 7)
    _, everything = model.run_with_cache(tokens)
    for alias, canonical in model.aliases.items():
        assert everything[alias] is everything[canonical]
        _, one = model.run_with_cache(tokens, names_filter=alias)
        assert set(one.keys()) >= {alias, canonical}
        assert torch.equal(one[alias], everything[canonical])
    _, mids = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("resid_mid"))
    assert sum(name.endswith("resid_mid") for name in mids) == 4
    assert everything["blocks.2.attn.hook_z"].shape == (1, 7, 4, 6)
    with pytest.raises(KeyError, match="There is no hook"):
        model.run_with_cache(tokens, names_filter="blocks.0.hook_nothing")
    for name in ("blocks.1.hook_resid_post", "blocks.1.hook_out"):
        zeroed = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0)])
        assert not torch.allclose(zeroed, model(tokens))
    assert torch.equal(model(tokens), model(tokens))
    with pytest.raises(InputError, match="no next-token loss"):
        model(tokens, return_type="loss")


def test_a_hook_on_one_virtual_layer_leaves_the_others() -> None:
    model = tls.boot_albert(small())
    tokens = prompts(1, 7)
    _, before = model.run_with_cache(tokens)
    with model.hooks(fwd_hooks=[("blocks.2.hook_attn_out", lambda x, hook: x + 1)]):
        _, after = model.run_with_cache(tokens)
    changed = [not torch.equal(before["resid_post", i], after["resid_post", i]) for i in range(4)]
    assert changed == [False, False, True, True]


def test_the_given_model_is_left_as_it_was() -> None:
    hf = small()
    before = copy.deepcopy(hf.state_dict())
    modules = [type(module) for module in hf.modules()]
    model = tls.boot_albert(hf)
    tls.block_jacobian(model, prompts(1, 6), 1)
    assert [type(module) for module in hf.modules()] == modules
    assert all(torch.equal(before[key], value) for key, value in hf.state_dict().items())
    assert all(p.requires_grad for p in hf.parameters())
    assert (
        model.blocks[3].attn.q.weight
        is hf.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.query.weight
    )
    twin = copy.deepcopy(model)  # sharing survives a copy
    assert twin.blocks[0].attn.o.weight is twin.blocks[3].attn.o.weight
    assert twin.blocks[0].attn.o.weight is not model.blocks[0].attn.o.weight


def test_every_function_of_the_library_takes_it(model_of: Any, tmp_path: Path) -> None:
    model, tokens = model_of("albert"), prompts(40, 7)
    states = tls.capture(model, tokens)
    assert states.resid_mid is not None
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(tls.ResidualStates.from_cache(model, cache).resid_mid, states.resid_mid)
    blocks = list(tls.block_jacobians(model, tokens[:1]))
    assert [J.layer for J in blocks] == list(range(LAYERS))
    chained = tls.chain(model, tokens[:1])
    assert len(chained.effective_rank) == LAYERS
    graph = tls.unit_graph(states, layer=1, top_k=4)
    groups = tls.communities(graph, runs=3, nulls=3)
    assert tls.coupling(blocks[1], graph, groups, permutations=50).n_units == WIDTH
    result = tls.analyze(
        model, list(tokens), out=tmp_path / "run", jacobian_samples=2, spectrum_samples=1,
        permutations=100, louvain_runs=2, control="random-init", jobs=1,
    )  # fmt: skip
    assert set(result.tables["spectra"]["variant"]) == {"trained", "control"}
    assert tls.profile(model, tokens[:2]).to_dataframe()["layer"].nunique() == LAYERS


def test_the_layers_share_their_ov_circuits_and_not_their_jacobians(model_of: Any) -> None:
    model = model_of("albert")
    ov = tls.ov_circuits(model)
    assert ov.eigenvalues.shape == (LAYERS, HEADS, WIDTH // HEADS)
    assert torch.equal(ov.layer_matrix(0), ov.layer_matrix(2))
    first, second = list(tls.block_jacobians(model, prompts(1, 7), layers=[0, 1]))
    assert not torch.allclose(first.matrix, second.matrix)
    torch.testing.assert_close(model.OV[1, 2].AB, model.W_V[0, 2] @ model.W_O[0, 2])
    assert model.QK.AB.shape == (LAYERS, HEADS, WIDTH, WIDTH)


def test_embedding_and_unembedding_matrices() -> None:
    hf = small()
    model = tls.boot_albert(hf)
    word = hf.albert.embeddings.word_embeddings.weight
    mapping, dense = hf.albert.encoder.embedding_hidden_mapping_in.weight, hf.predictions.dense
    torch.testing.assert_close(model.W_E[5], mapping @ word[5])
    torch.testing.assert_close(model.W_U[:, 5], dense.weight.T @ hf.predictions.decoder.weight[5])
    assert model.all_head_labels[5] == "L1H1"


def test_train_mode_and_half_precision_are_said() -> None:
    model = tls.boot_albert(small())
    model.train()
    with pytest.raises(ModelStateError, match="train mode"):
        tls.block_jacobian(model, prompts(1, 6), 0)
    half = tls.boot_albert(small().to(torch.bfloat16))
    with pytest.warns(TLSpectralWarning, match="half precision"):
        J = tls.block_jacobian(half, prompts(1, 6), 0)
    assert J.matrix.dtype == torch.float32
    assert "bfloat16" in J.provenance.dtype


def test_what_is_no_albert_is_refused() -> None:
    for other in (small(kind="AlbertModel"), tiny("gpt2")):
        with pytest.raises(UnsupportedModelError, match="Expected AlbertForMaskedLM"):
            tls.boot_albert(other)
    with pytest.raises(InputError, match="belong to a checkpoint"):
        tls.boot_albert(small(), dtype=torch.float64)
    headed = tls.boot_albert(small(kind="AlbertForPreTraining"))
    assert headed(prompts(1, 6)).shape == (1, 6, 64)
    with pytest.raises(InputError, match="has no tokenizer"):
        headed("a text")


# ------------------------------------------------------------------------------- from a directory


def with_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "[CLS]", "[SEP]", "[MASK]", "<unk>", "the", "tower", "stands", "in", "Paris"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip
    hf = small()
    hf.save_pretrained(folder)
    return hf


def test_a_directory_is_loaded_by_name_with_its_tokenizer(tmp_path: Path) -> None:
    hf = with_tokenizer(tmp_path)
    model = tls.load_model(tmp_path)  # finds out by itself that it is an ALBERT
    assert isinstance(model, HookedAlbert)
    text = "the tower stands in Paris"
    tokens = model.to_tokens(text)
    assert tokens.tolist() == [[1, 5, 6, 7, 8, 9, 2]]
    assert model.to_tokens(text, prepend_bos=False).tolist() == [[5, 6, 7, 8, 9]]
    assert model.to_str_tokens(text)[1:3] == ["the", "tower"]
    assert model.to_string(tokens)[0].startswith("[CLS] the tower")
    torch.testing.assert_close(model(text), hf(tokens).logits)
    batch = model([text, "the tower"])  # padded, and the padding masked
    torch.testing.assert_close(batch[1, :4], model("the tower")[0])
    J = tls.block_jacobian(model, text, 2)
    assert torch.equal(J.matrix, tls.block_jacobian(model, tokens, 2).matrix)
    fresh = tls.reinitialised(model, seed=1)
    assert fresh.tokenizer is model.tokenizer
    assert tls.boot_albert(tmp_path, dtype=torch.float64).blocks[0].attn.o.weight.dtype == (
        torch.float64
    )


def test_a_directory_without_tokenizer_takes_ids(tmp_path: Path) -> None:
    hf = small()
    hf.save_pretrained(tmp_path)
    with pytest.warns(TLSpectralWarning, match="takes token ids only"):
        model = tls.boot_albert(tmp_path)
    torch.testing.assert_close(model(prompts(1, 6)), hf(prompts(1, 6)).logits)


def test_a_directory_with_other_weights_is_refused(tmp_path: Path) -> None:
    small(kind="AlbertModel").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="would be random"):
        tls.boot_albert(tmp_path)
    with pytest.raises(InputError, match="neither a local model nor reachable"):
        tls.boot_albert("no-such/albert")


def test_the_view_knows_it_as_an_encoder(model_of: Any) -> None:
    view = ModelView(model_of("albert"))
    assert not view.causal
    assert view.weights == "raw"
    assert view.architecture == "AlbertForMaskedLM"
