"""A model read block by block is the model in memory, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from zoo import ARCHITECTURES, VOCAB, tiny, tiny_hf

from tl_spectral import InputError, ModelStateError, UnsupportedModelError
from tl_spectral.capture import capture
from tl_spectral.jacobian import sample_jacobians
from tl_spectral.model.streamed import StreamedModel

STREAMED = [name for name in ARCHITECTURES if name != "albert"]
TEXTS = list(torch.randint(8, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1)))


def saved(name: str, folder: Path, size: str = "20KB") -> Path:
    tiny_hf(name).save_pretrained(folder, max_shard_size=size)
    return folder


@pytest.mark.parametrize("name", STREAMED)
def test_blocks_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Local attention, layer-dependent options and key/value caches included."""
    whole = tiny(name)
    saved(name, tmp_path)
    streamed = StreamedModel(tmp_path)
    assert streamed.n_layers == whole.cfg.n_layers
    states: list[torch.Tensor] = []
    _, cache = whole.run_with_cache(torch.stack(TEXTS))
    for layer in range(streamed.n_layers):
        block = streamed.block(layer, TEXTS)
        with block.feed(TEXTS, states or list(cache["blocks.0.hook_in"])) as model:
            _, seen = model.run_with_cache(torch.stack(TEXTS))
            states = list(seen["blocks.0.hook_out"].reshape(3, 9, -1))
            ((_, J),) = sample_jacobians(model, TEXTS, [0])
            here = capture(model, TEXTS, pos=4)
        expected = cache[f"blocks.{layer}.hook_out"].reshape(3, 9, -1)
        assert torch.equal(torch.stack(states), expected)
        assert torch.equal(here.resid_post[0], expected[:, 4])
        ((_, expected_J),) = sample_jacobians(whole, TEXTS, [layer])
        assert torch.equal(J, expected_J)


def test_the_first_block_embeds(tmp_path: Path) -> None:
    whole = tiny("gpt2")
    block = StreamedModel(saved("gpt2", tmp_path)).block(0, TEXTS)
    assert torch.equal(capture(block.model, TEXTS).resid_pre[0], capture(whole, TEXTS).resid_pre[0])


def test_half_precision_and_one_file(tmp_path: Path) -> None:
    saved("llama", tmp_path, size="1GB")
    tensors = {name: t.bfloat16() for name, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    block = StreamedModel(tmp_path).block(1, TEXTS)
    weight = block.model.blocks[0].mlp.W_in
    assert weight.dtype == torch.float32
    assert torch.equal(weight, tensors["model.layers.1.mlp.up_proj.weight"].float().T)


def test_what_it_holds_is_one_block(tmp_path: Path) -> None:
    """And of the vocabulary the tokens in use."""
    saved("llama", tmp_path)
    block = StreamedModel(tmp_path).block(2, TEXTS[:1])
    held = {id(p): p.numel() for p in block.model.parameters()}
    used = len({*TEXTS[0].tolist(), 5})
    in_block = sum(p.numel() for p in block.model.blocks[0].parameters())
    assert sum(held.values()) == in_block + 2 * used * 24 + 24  # embeddings, unembedding, norm


class TestRefused:
    def test_tokens_and_texts_it_was_not_given(self, tmp_path: Path) -> None:
        block = StreamedModel(saved("llama", tmp_path)).block(1, TEXTS[:1])
        missing = next(t for t in range(8, VOCAB) if t not in TEXTS[0])
        with pytest.raises(InputError, match=f"Token {missing} is not in the texts"):
            block.model(torch.tensor([[missing, missing]]))
        with (
            block.feed(TEXTS[:1], [torch.zeros(9, 24)]) as model,
            pytest.raises(InputError, match="no states"),
        ):
            model(TEXTS[0][None, :5])

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        saved("llama", tmp_path)
        lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(InputError, match=rf"{lost.name} is missing; it holds \d+ tensors"):
            StreamedModel(tmp_path)

    def test_a_truncated_shard(self, tmp_path: Path) -> None:
        saved("llama", tmp_path)
        shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(InputError, match=f"{shard.name} is damaged"):
            StreamedModel(tmp_path)

    def test_a_shard_of_another_model(self, tmp_path: Path) -> None:
        saved("llama", tmp_path)
        index = tmp_path / "model.safetensors.index.json"
        document = json.loads(index.read_text())
        file = document["weight_map"]["model.norm.weight"]
        document["weight_map"]["model.layers.0.extra"] = file
        index.write_text(json.dumps(document))
        with pytest.raises(InputError, match=r"lacks model\.layers\.0\.extra"):
            StreamedModel(tmp_path)

    def test_weights_that_are_not_finite(self, tmp_path: Path) -> None:
        saved("llama", tmp_path, size="1GB")
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        model = StreamedModel(tmp_path)
        model.block(0, TEXTS)
        with pytest.raises(ModelStateError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            model.block(1, TEXTS)

    def test_a_block_without_all_its_weights(self, tmp_path: Path) -> None:
        saved("llama", tmp_path, size="1GB")
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match="lacks weights of layer 1"):
            StreamedModel(tmp_path).block(1, TEXTS)

    def test_architectures_that_cannot_be_taken_apart(self, tmp_path: Path) -> None:
        saved("albert", tmp_path / "albert")
        with pytest.raises(UnsupportedModelError, match="share one block"):
            StreamedModel(tmp_path / "albert")
        tf.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
        save_file({"shared.weight": torch.zeros(2, 2)}, tmp_path / "t5" / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match="more than one stack"):
            StreamedModel(tmp_path / "t5")

    def test_no_safetensors(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(InputError, match="only safetensors"):
            StreamedModel(tmp_path)
