"""Quantised bases: how small they are, what they keep, and that adapters learn on them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from qie.config import Config, LoraConfig, LossConfig
from qie.errors import ConfigError
from qie.pretrained import open_pretrained
from qie.training.model import quantize as quantize_module
from qie.training.model.lora import add_lora
from qie.training.model.quantize import is_quantized, quantize_blocks
from qie.training.model.trainable import TrainableModel
from qie.training.objective import Objective
from tests.conftest import ROOT
from tests.training.adapters import call, one_batch, randomise, transformer_of

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
# What rounding to 3 bits of mantissa, to 127 steps, and to 16 values leaves of the prediction, on this model.
ERRORS = {"fp8": 0.06, "int8": 0.02, "nf4": 0.3}
CPU = torch.device("cpu")


@pytest.fixture(params=list(ERRORS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def batch(photos: Path, encoder):
    return one_batch(photos, encoder, count=2)


@pytest.fixture(scope="module")
def objective() -> Objective:
    """The noise of a step is a function of its number."""
    return Objective(LossConfig(shift="none"), 0.0, 0, {}, CPU, torch.float32)


def stored_bytes(tensor) -> int:
    """All that stands for a weight: values, scales, and scales of scales."""
    if state := getattr(tensor, "quant_state", None):
        parts = [tensor.data, *(part for part in state.as_dict().values() if isinstance(part, torch.Tensor))]
    else:
        parts = [getattr(tensor, name) for name in getattr(tensor, "tensor_data_names", [])] or [tensor]
    return sum(part.numel() * part.element_size() for part in parts)


def test_layers_of_blocks_to_be_offloaded_leave_the_device_one_by_one(tiny_edit: Path, monkeypatch) -> None:
    transformer = transformer_of(tiny_edit, torch.bfloat16)
    moves: list[tuple[torch.nn.Module, str]] = []
    monkeypatch.setattr(quantize_module, "_layer_maker", lambda _: lambda linear: linear)
    monkeypatch.setattr(torch.nn.Linear, "to", lambda linear, device: moves.append((linear, str(device))) or linear)
    monkeypatch.setattr(torch.nn.Linear, "cpu", lambda linear: moves.append((linear, "cpu")) or linear)
    quantize_blocks(transformer, "fp8", torch.device("cuda"), in_host_memory=[1])
    first, second = (
        [m for m in block.modules() if isinstance(m, torch.nn.Linear)] for block in transformer.transformer_blocks
    )
    stay = [(layer, "cuda") for layer in first if layer is not transformer.transformer_blocks[0].img_mod[1]]
    assert moves == stay + [(layer, where) for layer in second for where in ("cuda", "cpu")]


def test_only_one_layer_is_in_full_precision_on_the_device(tiny_edit: Path, monkeypatch) -> None:
    transformer = transformer_of(tiny_edit, torch.bfloat16)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def make(linear: torch.nn.Linear) -> torch.nn.Module:
        alive.append(sum(weight() is not None for weight in made))
        made.append(weakref.ref(linear.weight))
        return torch.nn.Identity()

    monkeypatch.setattr(quantize_module, "_layer_maker", lambda _: make)
    quantize_blocks(transformer, "fp8", CPU)
    assert len(alive) == 27 and max(alive) <= 1, "the one before has just been replaced"


def test_blocks_of_a_lora_hand_on_the_dtype_of_the_base_and_autocast_is_off(tiny_edit: Path, kind, batch) -> None:
    settings = {"model": {"quantize": kind, "lora": {"r": 4}}, "train": {"gradient_checkpointing": False}}
    settings["model"]["pretrained_model_name_or_path"] = str(tiny_edit)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    pretrained = open_pretrained(str(tiny_edit), components=("transformer",))
    trainable = TrainableModel(pretrained, Config.model_validate(settings), torch.bfloat16, CPU)
    trainable.prepare(accelerator, torch.optim.SGD(trainable.parameters.values(), lr=0.1))
    seen: list[torch.dtype] = []
    for block in trainable.transformer.transformer_blocks:
        block.register_forward_hook(lambda _, __, outputs: seen.extend(value.dtype for value in outputs))
    Objective(LossConfig(shift="none"), 0.0, 0, {}, CPU, torch.bfloat16).loss(trainable.model, batch, 0).backward()
    assert set(seen) == {torch.bfloat16} and not hasattr(trainable.transformer, "_original_forward")
    assert {weight.grad.dtype for weight in trainable.parameters.values() if weight.grad is not None} == {torch.float32}


def block_weights(transformer) -> dict[str, torch.Tensor]:
    named = transformer.transformer_blocks.named_modules()
    return {name: module.weight for name, module in named if isinstance(module, torch.nn.Linear)}


def test_each_block_but_for_the_first_modulation_is_stored_in_fewer_bits(tiny_edit: Path, kind) -> None:
    plain, quantised = (transformer_of(tiny_edit, torch.bfloat16, quantize=how) for how in (None, kind))
    assert is_quantized(quantised) and not is_quantized(plain)
    weights, before = block_weights(quantised), block_weights(plain)
    whole = [name for name, weight in weights.items() if stored_bytes(weight) == stored_bytes(before[name])]
    assert whole == ["0.img_mod.1"]
    for name in weights.keys() - set(whole):
        rows, columns = before[name].shape
        # A byte and a float32 for each row; or half a byte, and one of 8 bits for 64 weights with two small tables.
        expected = rows * columns + 4 * rows if kind != "nf4" else rows * columns * (1 / 2 + 1 / 64)
        slack = 0 if kind != "nf4" else 1024 + 64 + 4 * (rows * columns / 64 / 256 + 1) + 8
        assert expected <= stored_bytes(weights[name]) <= expected + slack, name
    parameters = dict(quantised.named_parameters())
    outside = {name: weight for name, weight in plain.named_parameters() if "transformer_blocks" not in name}
    assert all(torch.equal(parameters[name], weight) for name, weight in outside.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_base_predicts_nearly_the_same_and_stays_as_it_is(tiny_edit: Path, batch, kind, dtype) -> None:
    """bitsandbytes repacks weights in evaluation on some CPUs, and rounds their scales once more."""
    inputs, expected = batch.to(CPU, dtype), call(transformer_of(tiny_edit), batch)
    transformer = transformer_of(tiny_edit, dtype, quantize=kind)
    found = call(transformer.train(), inputs)
    assert torch.equal(call(transformer.eval(), inputs), found)
    assert torch.equal(call(transformer.train(), inputs), found)
    assert 0.001 < float((found.float() - expected).std() / expected.std()) < ERRORS[kind]


def test_an_adapter_learns_on_a_quantised_base_which_stays_as_it_is(tiny_edit: Path, batch, objective, kind) -> None:
    transformer = transformer_of(tiny_edit, quantize=kind)
    add_lora(transformer, LoraConfig(r=4, target_modules=["to_q", "to_out.0", "img_mlp.net.2"]), seed=0)
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    base = {name: copy.deepcopy(weight) for name, weight in block_weights(transformer).items()}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(20):
        loss = objective.loss(transformer, batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    after = block_weights(transformer)
    assert all(stored_bytes(after[name]) == stored_bytes(base[name]) for name in base)


def test_an_adapter_gets_the_gradients_that_the_restored_weights_give_and_none_of_those_is_kept(
    tiny_edit: Path, batch, objective, kind
) -> None:
    """A plain base that holds the restored weights computes the same, forward and backward."""
    from peft.utils.integrations import dequantize_module_weight

    quantised, plain = transformer_of(tiny_edit, quantize=kind), transformer_of(tiny_edit)
    shapes = {weight.shape for weight in block_weights(plain).values()}
    for name, module in quantised.transformer_blocks.named_modules():
        if isinstance(module, torch.nn.Linear):
            plain.transformer_blocks.get_submodule(name).weight.data = dequantize_module_weight(module).detach()
    for transformer in (quantised, plain):
        add_lora(transformer, LoraConfig(r=4), seed=0)
        randomise(transformer)
    mine = {parameter.data_ptr() for parameter in quantised.parameters() if type(parameter) is torch.nn.Parameter}
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if "torchao" in type(tensor).__module__:
            return tensor  # the weight as it is stored
        weight = tensor.ndim == 2 and tensor.is_floating_point() and {tensor.shape, tensor.T.shape} & shapes
        if weight and tensor.data_ptr() not in mine:
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective.loss(quantised, batch, 0)
    assert kept == []
    gradients = []
    for transformer, value in ((quantised, loss), (plain, objective.loss(plain, batch, 0))):
        value.backward()
        found = {name: weight.grad for name, weight in transformer.named_parameters() if weight.grad is not None}
        gradients.append({name.replace(".base_layer", ""): gradient for name, gradient in found.items()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).abs().max() <= 1e-4 * gradient.std(), name


def test_quantising_leaves_the_options_of_the_process_alone_and_names_a_missing_package(
    tiny_edit: Path, monkeypatch, kind
) -> None:
    import torch._inductor.config as inductor

    before = torch.get_float32_matmul_precision(), inductor.save_config()
    transformer_of(tiny_edit, quantize=kind)
    assert (torch.get_float32_matmul_precision(), inductor.save_config()) == before
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn" if kind == "nf4" else "torchao.quantization", None)
    with pytest.raises(ConfigError) as caught:
        transformer_of(tiny_edit, quantize=kind)
    assert all(word in str(caught.value) for word in ["model.quantize", kind, "pip install qie[quant]"])


DDP = """
import sys
import torch
from pathlib import Path
from qie.config import LoraConfig
from qie.training.model.lora import add_lora
from tests.training.adapters import transformer_of

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
for kind in sys.argv[2:]:
    transformer = transformer_of(Path(sys.argv[1]), quantize=kind)
    add_lora(transformer, LoraConfig(r=4), seed=rank)
    wrapped = torch.nn.parallel.DistributedDataParallel(transformer, find_unused_parameters=True)
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    total = torch.stack([parameter.detach().double().sum() for parameter in trained]).sum()
    totals = [torch.zeros_like(total) for _ in range(2)]
    torch.distributed.all_gather(totals, total)
    assert totals[0] == totals[1] != 0, (kind, totals)
    del wrapped
torch.distributed.destroy_process_group()
"""


def test_two_processes_share_the_adapter_on_a_quantised_base(tiny_edit: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(tmp_path / "script.py"), str(tiny_edit), *ERRORS]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
