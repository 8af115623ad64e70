"""Modules that predict later tokens, against the equations of arXiv 2412.19437, section 2.2, in torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lm_trainer.core.batch import Batch
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.models import AnyModel, hf
from lm_trainer.nn.loss import token_loss
from lm_trainer.nn.multi_token import LaterTokens
from lm_trainer.nn.multi_token_spec import MultiTokenSpec
from lm_trainer.nn.spec import NormSpec
from lm_trainer.profile.flops import flops_per_token
from tests.compiling import quick_jit
from tests.models.common import SEQ, TINY, VOCAB, change, disturbed, graphdef, params, positions, tokens
from tests.models.test_every_family import shapes, unused_experts
from tests.nn.common import BLOCK, make_spec

DOCUMENTS = (7, 3, 5)
"""Lengths of the documents of a row; one position of padding follows."""


def packed_rows(seed: int = 0) -> Batch:
    """Two rows of documents. The last position of a document predicts nothing, except in the second row's last one."""
    rows, lengths = tokens(2, SEQ + 1, seed), np.array(DOCUMENTS)
    segments = np.repeat(np.arange(len(lengths)), lengths)
    places = np.concatenate([np.arange(length) for length in lengths])
    pad = SEQ - len(segments)
    weights = np.where(places == np.repeat(lengths, lengths) - 1, 0.0, 1.0)
    second = weights.copy()
    second[-1], second[2] = 1.0, 0.5
    return Batch(
        rows[:, :-1],
        rows[:, 1:],
        np.stack([np.pad(weights, (0, pad)), np.pad(second, (0, pad))]).astype(np.float32),
        np.tile(np.pad(places, (0, pad)).astype(np.int32), (2, 1)),
        np.tile(np.pad(segments, (0, pad), constant_values=-1).astype(np.int32), (2, 1)),
    )


def select(batch: Batch, row: int, document: int) -> Batch:
    """One document of a row, as a batch of its own."""
    where = np.flatnonzero(np.asarray(batch.segments)[row] == document)
    document_rows = jax.tree.map(lambda x: np.asarray(x)[row : row + 1, where], batch)
    return document_rows._replace(segments=np.zeros((1, len(where)), np.int32))


def losses(config: AnyModel, weights: Any, batch: Batch) -> Any:
    graph = graphdef(config)
    return quick_jit(lambda p, b: token_loss(nnx.merge(graph, p), b))(weights, batch)


def gradients(config: AnyModel, weights: Any, batch: Batch) -> dict[str, np.ndarray]:
    graph = graphdef(config)
    grads = quick_jit(jax.grad(lambda p, b: token_loss(nnx.merge(graph, p), b)[0]))(weights, batch)
    return {name: np.asarray(x) for name, x in named_leaves(grads).items()}


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rows_of_later_tokens(depth):
    batch = packed_rows()
    later = LaterTokens.from_batch(batch, depth)
    for row in range(2):
        for i in range(SEQ):
            document = batch.segments[row, i]
            counts = i + depth < SEQ and document >= 0 and batch.segments[row, i + depth] == document
            assert later.segments_BS[row, i] == (document if counts else -1)
            assert later.weights_BS[row, i] == (batch.weights[row, i + depth] if counts else 0)
            if counts:
                assert later.tokens_BS[row, i] == batch.tokens[row, i + depth]
                assert later.targets_BS[row, i] == batch.targets[row, i + depth]


def build_reference(config: AnyModel, weights: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model and its modules as transformers reads them from an export with the names of published files."""
    import transformers
    from transformers.modeling_layers import MtpModel

    written = hf.config_to_hf(config, vocab_size=VOCAB, eos_id=2, bos_id=1)
    (directory / "config.json").write_text(json.dumps(written), encoding="utf-8")
    tensors = hf.params_to_hf(config, weights)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model_class: Any = getattr(transformers, written["architectures"][0])
    # transformers knows the layers of the published sizes alone.
    patterns = [rf"model\.layers\.{config.num_layers + k}\..*" for k in range(written["num_nextn_predict_layers"])]
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", patterns)
    model, info = model_class.from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model = model.float().train()
    modules: Any = MtpModel.from_pretrained(model)
    return model, (modules if isinstance(modules, MtpModel) else modules[0]).float().train()


def reference_loss(model: Any, modules: Any, batch: Batch, weight: float) -> tuple[Any, Any]:
    """The sums of a document: of the next token, and of equations 21 to 25, with the layers of transformers."""
    import torch
    from torch.nn.functional import cross_entropy

    ids, targets = (torch.from_numpy(np.asarray(x)[0].astype(np.int64)) for x in (batch.tokens, batch.targets))
    weights = torch.from_numpy(np.asarray(batch.weights)[0])
    h = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    table, depth = model.get_input_embeddings().weight, len(modules.layers)
    total = (weights * cross_entropy(model.lm_head(h), targets, reduction="none")).sum()
    later = torch.zeros(())
    for k, module in enumerate(modules.layers, 1):
        length = len(ids) - k
        if length <= 0:
            break
        joined = torch.cat([module.enorm(table[ids[k:]]), module.hnorm(h[:length])], dim=-1) @ module.eh_proj.weight.T
        places = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotations = model.model.rotary_emb(joined[None], places)
        h = module.mtp_block(joined[None], attention_mask=mask, position_ids=places, position_embeddings=rotations)
        h = module.post_norm(h)[0]
        later = later + (weights[k:] * cross_entropy(model.lm_head(h), targets[k:], reduction="none")).sum() / depth
    return total + weight * later, later


def reference_gradient(name: str, model: Any, modules: Any, num_layers: int) -> np.ndarray | None:
    """The gradient of a tensor of a published file; None for one that transformers does not train."""
    parts = name.removeprefix("model.").split(".")
    root, own = (model, name) if name.startswith("lm_head") else (model.model, ".".join(parts))
    if parts[0] == "layers" and int(parts[1]) >= num_layers:
        root, inner = modules.layers[int(parts[1]) - num_layers], ".".join(parts[2:])
        renamed = {name: name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        own = {**renamed, "shared_head.norm.weight": "post_norm.weight"}.get(inner, f"mtp_block.{inner}")
    tensors = dict(root.named_parameters())
    if own in tensors:
        return tensors[own].grad.numpy()
    layer, _, expert = own.partition(".experts.")
    if not expert:
        return None
    number, matrix, _ = expert.split(".")
    joined = tensors[f"{layer}.experts.{'down_proj' if matrix == 'down_proj' else 'gate_up_proj'}"].grad[int(number)]
    if matrix == "down_proj":
        return joined.numpy()
    return joined.numpy()[: len(joined) // 2] if matrix == "gate_proj" else joined.numpy()[len(joined) // 2 :]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_loss_and_gradient_are_those_of_the_equations(name, depth, tmp_path, monkeypatch):
    """Packed rows here; there every document alone, so that none sees another one."""
    import torch

    config = change(TINY[name], mtp_depth=depth, mtp_loss_weight=0.4, lbl_coef=0.0, rzl_coef=0.0)
    weights, batch = disturbed(params(config)), packed_rows()
    model, modules = build_reference(config, weights, tmp_path, monkeypatch)
    documents = [select(batch, row, document) for row in range(2) for document in range(len(DOCUMENTS))]
    sums = [reference_loss(model, modules, document, 0.4) for document in documents]
    objective, later_sum = (torch.stack(values).sum() for values in zip(*sums, strict=True))
    objective.backward()
    loss, weight, metrics = losses(config, weights, batch)
    total, later = float(objective.detach()), float(later_sum.detach())
    assert float(weight) == np.asarray(batch.weights).sum()
    np.testing.assert_allclose(float(metrics["mtp_loss"]), later, rtol=1e-5)
    np.testing.assert_allclose(float(loss), total - 0.4 * later, rtol=1e-5)
    grads = gradients(config, weights, batch)
    ours = hf.params_to_hf(config, from_named_leaves(weights, grads))
    compared = 0
    for tensor, gradient in ours.items():
        expected = reference_gradient(tensor, model, modules, config.num_layers)
        if expected is None:
            continue
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max() + 1e-6, err_msg=tensor)
        compared += 1
    assert compared >= len(ours) - 2 * depth - (config.num_layers + depth)


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    config = TINY["deepseek_v3"]
    weights, batch = disturbed(params(config)), packed_rows()
    alone = [losses(config, weights, select(batch, 1, document))[2]["mtp_loss"] for document in range(len(DOCUMENTS))]
    packed = losses(config, weights, jax.tree.map(lambda x: x[1:], batch))[2]["mtp_loss"]
    np.testing.assert_allclose(packed, sum(alone), rtol=1e-5)


def dense_spec(**fields: Any) -> Any:
    norm = NormSpec(kind="rms", bias=False)
    return make_spec(multi_token=MultiTokenSpec(BLOCK, norm, **fields))


def test_the_loss_is_that_of_the_next_token():
    """The modules move gradients by their weight, and neither the loss nor logits."""
    from lm_trainer.nn.decoder import Decoder

    rows = np.random.default_rng(0).integers(0, 37, (2, 13)).astype(np.int32)
    batch = Batch(
        rows[:, :-1], rows[:, 1:], np.ones((2, 12), np.float32), positions(2, 12), np.zeros((2, 12), np.int32)
    )
    results = []
    for spec in (make_spec(), dense_spec(depth=2, loss_weight=0.5), dense_spec(depth=2, loss_weight=1.0)):

        def run(spec: Any = spec) -> Any:
            graph, state = nnx.split(Decoder(spec, rngs=nnx.Rngs(0)), nnx.Param)
            loss = lambda p: token_loss(nnx.merge(graph, p), batch)[0]  # noqa: E731
            value, grads = jax.value_and_grad(loss)(nnx.to_pure_dict(state))
            return value, grads["embed"]["tokens"]

        results.append([np.asarray(x) for x in quick_jit(run)()])
    (plain, d0), (half, d1), (whole, d2) = results
    np.testing.assert_allclose([half, whole], plain, rtol=1e-6)
    assert np.abs(d1 - d0).max() > 1e-2
    np.testing.assert_allclose(d2 - d0, 2 * (d1 - d0), atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_flops_are_those_of_the_loss(name):
    sizes: dict[str, Any] = {"hidden_dim": 512, "intermediate_dim": 1024, "moe_intermediate_dim": 512}
    wide = change(TINY[name], seq_len=64, num_layers=2, expert_kernel="dense", mtp_depth=2, **sizes)
    graph, rows = graphdef(wide), tokens(2, 65)
    ones, places = np.ones((2, 64), np.float32), positions(2, 64)
    batch = Batch(rows[:, :-1], rows[:, 1:], ones, places, np.zeros((2, 64), np.int32))
    cost = jax.jit(lambda p: token_loss(nnx.merge(graph, p), batch)).lower(shapes(wide)).cost_analysis()
    assert cost is not None
    spec = wide.spec(VOCAB)
    expected = flops_per_token(spec, 64).forward + unused_experts(spec)
    assert expected * 128 == pytest.approx(cost["flops"], rel=0.03)
    assert (
        flops_per_token(dataclasses.replace(spec, multi_token=None), 64).forward
        < 0.7 * flops_per_token(spec, 64).forward
    )
