"""The device memory that training takes: an estimate before anything is loaded, with advice if it is too much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from qie.config import Config, Quantization
from qie.data.live import LiveSamples
from qie.data.stream import Stream
from qie.errors import ConfigError, QieError
from qie.pretrained import PretrainedModel
from qie.training.flops import Architecture
from qie.training.model.blocks import (
    NOTHING_KEPT,
    KeptActivations,
    blocks_keeping_attention,
    checkpointed_blocks,
    offloaded_blocks,
)
from qie.training.model.kronecker import LoHaLinear, LoKrLinear
from qie.training.model.load import empty_transformer, train_all_weights
from qie.training.model.lora import add_lora
from qie.training.optimizer import require_rates
from qie.types import Shape

# Bytes of a quantised weight. nf4 has an 8-bit scale for each 64 weights; the others have one for each row.
_QUANTIZED_BYTES: dict[Quantization, float] = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 1 / 64}
# Bytes of such a weight while its layer computes: once or twice in float32, and in the dtype that it computes in.
_RESTORED_BYTES: dict[Quantization, int] = {"fp8": 10, "int8": 6, "nf4": 2}
# State of a trained weight, in copies of it, by the name of the optimizer's class; an unknown one counts as AdamW.
_STATES = {"SGD": 1, "Lion": 1, "RMSprop": 1, "Adagrad": 1, "Adafactor": 0, "Muon": 1, "Prodigy": 4}
_CONTEXT_BYTES = 1 << 30
# Of what a block keeps, keys, values and the inputs they come from.
_KEYS = 0.4
# Of a block's matrices those that are done with where its backward pass takes most: the text's MLP, or the last layer.
_DONE, _DONE_SINGLE = 8 / 36, 3 / 13
# torch's own kernels: what others call, and how, is theirs to change.
_FUSED = None, "native", "_native_cudnn", "_native_efficient", "_native_flash"
_RESERVE = 0.1
"""The part of a GPU's memory that `fill_memory` leaves: the estimate may err, and the allocator loses some to gaps."""


@dataclass(frozen=True)
class Parameters:
    """How many numbers a transformer has.

    Attributes:
        trained, frozen: altogether.
        matrices: the frozen ones in matrices of blocks: these are quantised, and can be offloaded.
        image_inputs, text_inputs: the summed widths of the inputs that a block's adapters keep, on either stream:
            query, key and value have one together, but for dropout.
        image_outputs, text_outputs: the same of adapters on the attention's output, which is kept anyway; in a batch of
            several samples they keep a copy of their stream's part.
        changes: the changes of weights that a block's adapters make, where these are as large as the weights.
    """

    trained: int
    frozen: int
    matrices: int
    image_inputs: int = 0
    text_inputs: int = 0
    image_outputs: int = 0
    text_outputs: int = 0
    changes: int = 0

    @classmethod
    def of(cls, transformer: Any) -> Parameters:
        """Count those of a transformer that is not quantised; an `empty_transformer` takes no memory."""
        everything, blocks = list(transformer.parameters()), transformer.transformer_blocks
        widths: dict[str, dict[str, int]] = {}
        for name, module in blocks[0].named_modules():
            if isinstance(module, BaseTunerLayer):
                text = name.startswith("txt_") or name.rpartition(".")[2].startswith(("add_", "to_add_"))
                for kind, owner, width in _kept_by_adapter(name, module):
                    widths.setdefault(f"{'text' if text else 'image'}_{kind}", {})[owner] = width
        hadamard = [layer for layer in blocks[0].modules() if isinstance(layer, LoHaLinear)]
        return cls(
            changes=sum(layer.in_features * layer.out_features for layer in hadamard),
            trained=sum(weight.numel() for weight in everything if weight.requires_grad),
            frozen=sum(weight.numel() for weight in everything if not weight.requires_grad),
            matrices=sum(w.numel() for w in blocks.parameters() if not w.requires_grad and w.ndim > 1),
            **{which: sum(found.values()) for which, found in widths.items()},
        )


def _kept_by_adapter(name: str, layer: Any) -> Iterator[tuple[str, str, int]]:
    """The kind of what an adapter keeps, whose it is, and its width in a block's numbers of 2 bytes."""
    if "_mod." in name:
        # Of a token itself nothing; but what two trained scales and gates multiply.
        yield "inputs", name, 4 * layer.in_features
        return
    if isinstance(layer, LoraLayer):
        if layer.lora_variant:
            # A DoRA: its input and its product in float32, and the base's product.
            yield "inputs", name, 2 * layer.in_features + 3 * layer.out_features
            return
        if any(isinstance(dropout, torch.nn.Dropout) for dropout in layer.lora_dropout.values()):
            yield "inputs", name, layer.in_features * 3 // 2  # what is left of the input, and where
            return
    if isinstance(layer, LoKrLinear):
        yield "inputs", name, sum(layer.inner_widths(adapter) for adapter in layer.active_adapters)
    kind = "outputs" if re.search(r"attn\.to_(add_)?out", name) else "inputs"
    shared = re.sub(r"(to|add)_[qkv](_proj)?$", "qkv", re.sub(r"img_mlp\.(proj|gate_layer)$", "gate", name))
    yield kind, shared, int(layer.in_features)


def optimizer_bytes(class_path: str, trained_bytes: int) -> float:
    """Bytes of an optimizer's state for each trained number: 8-bit ones keep a byte instead of such a number."""
    name = class_path.rpartition(".")[2]
    small = name.endswith("8bit")
    plain = name.removesuffix("8bit").removeprefix("Paged")
    return _STATES.get(plain, 2) * (1 if small else trained_bytes)


@dataclass(frozen=True)
class Setup:
    """Everything that memory depends on.

    Attributes:
        image_tokens: target and controls of the largest sample, 16×16 pixels a token.
        text_tokens: the longest prompt, as Qwen2.5-VL gives it.
        target_tokens: those of the image tokens that are the target's, see `step_flops`.
        controls: the number of images, of equal size, that the other image tokens belong to.
        draws: so many noisy ones of each target share its text and controls.
        targets: of a sample: 2 of a pair.
        base_passes: forward passes of the base for each sample, without gradient.
        batch_size: per process.
        value_bytes: 2 or 4 for a number in a computation, and for a frozen weight that is not quantised.
        fp8_compute: most layers that are quantised to fp8 compute in it, too; memory does not depend on it.
        trained_bytes: a trained weight, and its gradient.
        optimizer_bytes: the optimizer's state for each trained number.
        gradient_checkpointing, offload_blocks, kept, compiled: see `checkpoint_activations`.
        fused_attention: its outputs can be kept, see `blocks_keeping_attention`.
        accumulates: gradients of one batch are added to those of another.
        processes: the number that train together.
        sharded: each process holds its part of the weights (FSDP) instead of all (DDP).
    """

    architecture: Architecture
    parameters: Parameters
    image_tokens: int
    text_tokens: int
    target_tokens: int | None = None
    controls: float = 1.0
    draws: int = 1
    targets: int = 1
    base_passes: float = 0
    batch_size: int = 1
    value_bytes: int = 2
    quantize: Quantization | None = None
    fp8_compute: bool = False
    trained_bytes: int = 4
    optimizer_bytes: float = 8.0
    ema: bool = False
    gradient_checkpointing: int = 1
    offload_blocks: int = 0
    kept: KeptActivations = NOTHING_KEPT
    compiled: bool = False
    fused_attention: bool = True
    accumulates: bool = False
    processes: int = 1
    sharded: bool = False

    @property
    def sequences(self) -> int:
        """Of a batch: those that a block computes, each with text and controls of its own."""
        return self.batch_size * (1 if self.architecture.single_stream else self.targets)

    @property
    def noisy_targets(self) -> int:
        """Of a sequence: they share its text and controls."""
        return self.draws * (self.targets if self.architecture.single_stream else 1)

    @property
    def predicted_tokens(self) -> int:
        """Of a sequence: those of its noisy targets."""
        return self.noisy_targets * (self.image_tokens if self.target_tokens is None else self.target_tokens)

    @property
    def tokens(self) -> int:
        """Of a sequence in a block: those of text, controls and noisy targets."""
        one_target = self.predicted_tokens // self.noisy_targets
        return self.text_tokens + self.image_tokens - one_target + self.predicted_tokens

    @property
    def all_trained(self) -> bool:
        return self.parameters.trained > self.parameters.frozen

    @property
    def checkpointed(self) -> list[int]:
        """The numbers of the blocks that are recomputed."""
        return checkpointed_blocks(
            self.architecture.blocks, self.gradient_checkpointing, self.offload_blocks, self.kept.blocks
        )

    @property
    def keeping_attention(self) -> list[int]:
        """The numbers of those that are recomputed but for their attention."""
        never = offloaded_blocks(self.architecture.blocks, self.offload_blocks) if self.compiled else ()
        return blocks_keeping_attention(self.checkpointed, self.kept.attention, never)


def plan_memory(config: Config, pretrained: PretrainedModel, stream: Stream, accelerator: Accelerator) -> Setup:
    """Everything that a run's memory depends on. Wrong LoRA targets are refused here, before weights are read.

    Raises:
        ConfigError: the adapter does not fit the transformer, or FSDP cannot spread its weights.
    """
    return setup_of(config, pretrained, largest(stream, pretrained.family.patch), accelerator)


class Tokens(NamedTuple):
    """How many a sample has; `image` are those of target and controls, `controls` the number of these."""

    image: int
    target: int
    text: int
    controls: float = 1.0


def largest(stream: Stream, patch: int) -> Tokens:
    """Those of the sample of a stream with the most image tokens, and of the longest text. See `image_tokens`."""
    columns = stream.samples.columns
    most = max((image_tokens(shape, patch) for shape in columns.shape_names), default=(0, 0, 0))
    image, target, controls = most
    return Tokens(image, target, int(columns.lengths.max(initial=0)), controls)


def image_tokens(shape: Shape, patch: int) -> tuple[int, int, int]:
    """Tokens of target and controls, tokens of the target alone, and the number of controls.

    A token is a square of latent pixels, `patch` on a side.
    """
    target, *controls = (height * width // patch**2 for height, width in (shape.target, *shape.controls))
    return target + sum(controls), target, len(controls)


def _base_passes(config: Config) -> float:
    """One for a pair, and for a sample that is preserved, as often as one is drawn."""
    if config.loss.of_pairs or not isinstance(config.data.source, list):
        return float(config.loss.of_pairs)
    preserved = sum(one.weight for one in config.data.source if one.preserve)
    return preserved / sum(one.weight for one in config.data.source)


def setup_of(config: Config, pretrained: PretrainedModel, tokens: Tokens, accelerator: Accelerator) -> Setup:
    """What `plan_memory` gives, for samples of at most so many tokens.

    Raises:
        ConfigError: the adapter does not fit the transformer, or FSDP cannot spread its weights.
    """
    model, section = config.model, config.train
    sharded = accelerator.distributed_type == "FSDP"
    if sharded and (model.quantize in ("fp8", "int8") or section.offload_blocks):
        raise ConfigError(
            "weights that are sharded over processes cannot be fp8 or int8, nor be offloaded",
            where="model.quantize" if model.quantize else "train.offload_blocks",
            hint="set model.quantize to null or nf4 and train.offload_blocks to 0, or use configs/accelerate/ddp.yaml",
        )
    transformer = empty_transformer(pretrained)
    trained = getattr(torch, section.trained_dtype)
    if model.lora:
        add_lora(transformer, model.lora.model_copy(update={"continue_from": None}), section.seed, dtype=trained)
    else:
        train_all_weights(transformer, trained)
    if config.optimizer.lr_pattern:
        require_rates(config.optimizer, (name for name, one in transformer.named_parameters() if one.requires_grad))
    return Setup(
        Architecture.of(transformer.config),
        Parameters.of(transformer),
        image_tokens=tokens.image,
        text_tokens=tokens.text,
        target_tokens=tokens.target,
        controls=tokens.controls,
        draws=section.draws_per_sample,
        targets=2 if config.loss.of_pairs else 1,
        base_passes=_base_passes(config),
        batch_size=config.data.batch_size,
        value_bytes=2 if section.mixed_precision == "bf16" else 4,
        quantize=model.quantize,
        fp8_compute=section.fp8_compute,
        trained_bytes=trained.itemsize,
        optimizer_bytes=optimizer_bytes(config.optimizer.class_path, trained.itemsize),
        ema=section.ema_decay is not None,
        gradient_checkpointing=section.checkpointed_every,
        offload_blocks=section.offload_blocks,
        compiled=section.compile,
        fused_attention=model.attention_backend in _FUSED,
        accumulates=section.gradient_accumulation_steps > 1,
        processes=accelerator.num_processes,
        sharded=sharded,
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes on a device when most are taken: where the backward pass begins, where it ends, or in the optimizer's step.

    Attributes:
        weights: frozen and trained.
        gradients: those of trained weights, if there are any by then; with DDP also its buffers.
        optimizer: its state, and averaged weights.
        activations: values that the forward pass has kept for the backward pass, and that are still needed.
        workspace: the CUDA context, and the intermediate values of a block or of the optimizer.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace

    def lines(self) -> list[str]:
        """A line for each part, and one for the total."""
        parts = [(field.name, float(getattr(self, field.name))) for field in fields(self)]
        return [f"{name:<12}{_gb(value):>8}" for name, value in [*parts, ("total", self.total)]]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def kept_bytes(setup: Setup) -> float:
    """Bytes that a block without checkpointing keeps of a batch for its backward pass."""
    of_one = _kept_single(setup) if setup.architecture.single_stream else _kept_dual(setup)
    return setup.sequences * of_one + setup.value_bytes * setup.parameters.changes


def _kept_dual(setup: Setup) -> float:
    """Bytes of a sample in a block of two streams.

    Read in diffusers' transformer_qwenimage and normalization. A token keeps, in numbers of the width d: the inputs of
    two LayerNorms; query and key each with, for its norm, a float32 form; query, key, value and output of the
    attention; the MLP's 4 d before its activation. Frozen linear layers keep nothing of their input, adapters keep it.
    If all weights are trained: the inputs of query, key and value (with autocast a copy each), of the MLP's layers and
    of the norms' scales; the normalised values, for the modulation; and the values that both gates multiply; autocast
    makes LayerNorms float32, and float32 scales the queries and keys.
    """
    value, width, parameters = setup.value_bytes, setup.architecture.width, setup.parameters
    numbers = 2 * value + 2 * _normed(value) + 4 * value + 4 * value
    if setup.all_trained:
        copies = 1 if value == 4 else 3
        numbers += 2 * (4 - value) + copies * value + (1 + 4) * value + 2 * value + 2 * 4 + 2 * value
        numbers += 6 if setup.trained_bytes > value else 0
    kept = numbers * width * setup.tokens
    kept += value * (parameters.image_inputs * setup.image_tokens + parameters.text_inputs * setup.text_tokens)
    if setup.sequences > 1:
        outputs = (width, width) if setup.all_trained else (parameters.image_outputs, parameters.text_outputs)
        kept += value * (outputs[0] * setup.image_tokens + outputs[1] * setup.text_tokens)
    return float(kept)


def _kept_single(setup: Setup, *, last: bool = False) -> float:
    """Bytes of a sample in a block of a single stream.

    Read in training/model/single_stream. A token keeps, in numbers of the width d: the inputs of two LayerNorms; query
    and key each with, for its norm, a float32 form; query, key, value and output of the attention; the MLP's 3 d before
    its activation, behind it, and of its other half. Each draw has keys and values of its prefix and its own beside one
    another. Adapters keep their inputs; those on the attention's output a copy, in which prefix and targets are joined.
    The `last` block computes for the targets alone, but for keys.
    """
    value, width, parameters = setup.value_bytes, setup.architecture.width, setup.parameters
    asking = setup.predicted_tokens if last else setup.tokens
    of_keys, of_others = value + _normed(value), 3 * value + _normed(value) + 3 * setup.architecture.gated_mlp * value
    if setup.all_trained:
        # Inputs of linear layers, copied by autocast; normalised values, what gates multiply, scaled queries.
        of_others += 6 * (4 - value) + (9 + setup.architecture.gated_mlp) * value
        of_others += 6 if setup.trained_bytes > value else 0
    kept = width * (of_keys * setup.tokens + (of_others + (0 if last else 2 * value)) * asking)
    behind = setup.noisy_targets * (setup.image_tokens + setup.text_tokens)
    kept += 2 * value * width * behind
    return float(kept + value * (parameters.image_inputs * setup.tokens + parameters.image_outputs * asking))


def _normed(value_bytes: int) -> int:
    """Bytes of a number that diffusers' RMSNorm keeps: in float32, and as it came."""
    return 4 if value_bytes == 4 else value_bytes + 4


def attention_bytes(setup: Setup) -> int:
    """Bytes of what attention gives a block for a batch: its output, and the logarithm of each row's sum in float32."""
    return (
        setup.sequences * setup.tokens * (setup.value_bytes * setup.architecture.width + 4 * setup.architecture.heads)
    )


def offloaded_bytes(setup: Setup) -> float:
    """Bytes of the weights that lie in host memory."""
    return _matrices_of_block(setup) * min(setup.offload_blocks, setup.architecture.blocks)


def _matrices_of_block(setup: Setup) -> float:
    each = _QUANTIZED_BYTES[setup.quantize] if setup.quantize else setup.value_bytes
    return setup.parameters.matrices * each / setup.architecture.blocks


def _activations(setup: Setup) -> list[float]:
    """Bytes of activations when the backward pass of each block begins: what it and the blocks before it have kept, and
    what it has recomputed. Those of blocks after it are freed."""
    inputs = setup.sequences * setup.tokens * setup.architecture.width * setup.value_bytes
    whole, attention = kept_bytes(setup), float(attention_bytes(setup))
    checkpointed, keeping = set(setup.checkpointed), set(setup.keeping_attention)
    found, kept = [], 0.0
    for number in range(setup.architecture.blocks):
        if number == setup.architecture.blocks - 1 and setup.target_tokens is not None:
            # It keeps of the other tokens keys and values alone, so that the block before it often takes most.
            whole, attention = _kept_by_last(setup), attention * setup.predicted_tokens / setup.tokens
        kept_of_attention = attention if number in keeping else 0
        again = whole - kept_of_attention if number in checkpointed else 0.0
        kept += inputs + kept_of_attention if number in checkpointed else whole
        found.append(kept + again)
    return found


def _kept_by_last(setup: Setup) -> float:
    """What `kept_bytes` is for the last block, where the target alone is predicted."""
    if setup.architecture.single_stream:
        return setup.sequences * _kept_single(setup, last=True)
    return (_KEYS + (1 - _KEYS) * setup.predicted_tokens / setup.tokens) * kept_bytes(setup)


def estimate(setup: Setup) -> Estimate:
    """The most memory that a training step takes."""
    parameters, blocks = setup.parameters, setup.architecture.blocks
    parts = setup.processes if setup.sharded else 1
    block = _matrices_of_block(setup)
    # Where a block has been recomputed and its gradient is computed, the next is fetched already. Most is taken in the
    # image's MLP, or in the single one.
    done = _DONE_SINGLE if setup.architecture.single_stream else _DONE
    offloaded = max(setup.offload_blocks - 2 + done, 0)
    frozen = (parameters.frozen - parameters.matrices) * setup.value_bytes + block * (blocks - offloaded)
    # FSDP gathers the block that is computed and the next.
    gathered = 2 * (block + parameters.trained * setup.value_bytes / blocks) if parts > 1 else 0
    trained = parameters.trained * setup.trained_bytes
    gradients = trained / parts * (2 if setup.processes > 1 and not setup.sharded else 1)
    # Autocast's copies of trained weights last for the forward pass.
    copied = setup.all_trained and setup.trained_bytes > setup.value_bytes
    casts = parameters.trained * setup.value_bytes / parts if copied else 0.0
    stays = setup.accumulates or setup.processes > 1
    # Before a block's backward pass, the blocks after it have their gradients. Casts are freed with activations.
    moments = [
        (
            gradients * (1.0 if stays else (blocks - 1 - number) / blocks),
            casts * (number + 1) / blocks + activations,
            _intermediate(setup),
        )
        for number, activations in enumerate(_activations(setup))
    ]
    # torch's optimizers work on all weights at once, when activations are freed.
    moments.append((gradients, 0.0, trained / parts if setup.optimizer_bytes > 2 else 0.0))
    gradients, activations, workspace = max(moments, key=sum)
    return Estimate(
        weights=(frozen + trained) / parts + gathered,
        gradients=gradients,
        optimizer=parameters.trained / parts * (setup.optimizer_bytes + (4 if setup.ema else 0)),
        activations=activations,
        workspace=_CONTEXT_BYTES + workspace,
    )


def _intermediate(setup: Setup) -> float:
    """Bytes of a block's values and gradients in its backward pass, beside what it keeps."""
    architecture = setup.architecture
    of_width = setup.sequences * setup.tokens * architecture.width * setup.value_bytes
    # The MLP's values and their gradients, or queries in float32: about so many numbers of the width for each token.
    numbers = (3.0 * architecture.gated_mlp or 8.0) + (4.0 if setup.all_trained else 0.0)
    if setup.quantize is None:
        return numbers * of_width
    # The MLP's weight, the largest, is restored. A gated one's has gone before most of its gradients are there.
    restored = _RESTORED_BYTES[setup.quantize] * (architecture.gated_mlp or 4) * architecture.width**2
    if architecture.single_stream:
        return max(numbers * of_width, numbers / 2 * of_width + restored)
    return numbers * of_width + restored


def fill_memory(setup: Setup, budget_bytes: float) -> Setup:
    """The setup that recomputes as little as its budget allows: first not attention, then not whole blocks."""

    def fits(kept: KeptActivations) -> bool:
        return estimate(replace(setup, kept=kept)).total <= budget_bytes

    checkpointed = len(setup.checkpointed)
    most = checkpointed if setup.fused_attention else 0
    attention = max((count for count in range(most + 1) if fits(KeptActivations(0, count))), default=0)
    blocks = 0
    if attention == most:
        blocks = max((count for count in range(checkpointed + 1) if fits(KeptActivations(count, most))), default=0)
    return replace(setup, kept=KeptActivations(blocks, attention))


def memory_to_fill(config: Config, stream: Stream, device: torch.device) -> float:
    """Bytes of a device for a run with train.gradient_checkpointing=auto; 0 where nobody can tell.

    What other programs take is not free. Encoders that encode rows live take as much as they need, when they do.
    """
    live = config.cache.write_through or (isinstance(stream.samples, LiveSamples) and stream.samples.lacking)
    if device.type != "cuda" or live:
        return 0.0
    return free_to_fill(config, *torch.cuda.mem_get_info(device))


def free_to_fill(config: Config, free: float, whole: float) -> float:
    """Bytes that a run may fill of the free ones of a GPU, given all that it has."""
    keep = config.cache.keep
    return free - _RESERVE * whole - (keep.budget_bytes if "gpu" in (keep.latents, keep.embeds) else 0)


def advice(setup: Setup) -> list[str]:
    """Changes of the configuration that need less, each with its own gain; the largest first."""
    now = estimate(setup).total
    gains = [(now - estimate(changed).total, change) for change, changed in _changes(setup)]
    return [f"{change}: {_gb(gain)} less" for gain, change in sorted(gains, reverse=True) if gain >= 0.01 * now]


def _changes(setup: Setup) -> list[tuple[str, Setup]]:
    blocks, parameters = setup.architecture.blocks, setup.parameters
    changes = [("train.gradient_checkpointing=true", replace(setup, gradient_checkpointing=1, kept=NOTHING_KEPT))]
    if setup.batch_size > 1:
        steps = f"data.batch_size=1 with train.gradient_accumulation_steps={setup.batch_size} times as many"
        changes.append((steps, replace(setup, batch_size=1)))
    fewer = sorted({setup.draws // 2, 1}, reverse=True) if setup.draws > 1 else []
    changes += [(f"train.draws_per_sample={draws}", replace(setup, draws=draws)) for draws in fewer]
    if setup.trained_bytes > 2:
        states = setup.optimizer_bytes if setup.optimizer_bytes <= 2 else setup.optimizer_bytes / 2
        changes.append(("train.trained_dtype=bfloat16", replace(setup, trained_bytes=2, optimizer_bytes=states)))
    changes += [
        ("optimizer.class_path=bitsandbytes.optim.AdamW8bit", replace(setup, optimizer_bytes=2.0)),
        ("train.ema_decay=null", replace(setup, ema=False)),
        ("data.area_px half as large, encoded again", half_as_large(setup)),
    ]
    if setup.processes > 1 and not setup.offload_blocks:
        changes.append(("FSDP, configs/accelerate/fsdp2.yaml", replace(setup, sharded=True)))
    if setup.all_trained:
        # One of rank 16 on the image stream's attention.
        adapter = Parameters(8 * 16 * setup.architecture.width * blocks, parameters.trained, parameters.trained)
        return [*changes, ("model.lora: {} instead of null", replace(setup, parameters=adapter))]
    if setup.quantize is None:
        changes.append(("model.quantize=fp8", replace(setup, quantize="fp8")))
    if not setup.offload_blocks:
        changes.append(("model.quantize=nf4", replace(setup, quantize="nf4")))
    if setup.quantize != "nf4" and not setup.sharded:
        for offload in (blocks // 2, blocks):
            if offload > setup.offload_blocks:
                changes.append((f"train.offload_blocks={offload}", replace(setup, offload_blocks=offload)))
    return changes


def half_as_large(setup: Setup) -> Setup:
    """The setup with half as many tokens of images."""
    target = None if setup.target_tokens is None else setup.target_tokens // 2
    return replace(setup, image_tokens=setup.image_tokens // 2, target_tokens=target)


def recomputation(setup: Setup) -> str:
    """What the backward pass computes again, as a person reads it."""
    again, but_attention = len(setup.checkpointed), len(setup.keeping_attention)
    found = f"{again} of {setup.architecture.blocks} blocks are recomputed"
    return f"{found}, {but_attention} of them without their attention" if but_attention else found


def lacking_memory(setup: Setup, device: torch.device) -> Iterator[str]:
    """A warning, with advice, if a run will need more of a GPU's memory than is free."""
    if device.type != "cuda":
        return
    free, expected = torch.cuda.mem_get_info(device)[0], estimate(setup)
    if expected.total > free:
        parts = ", ".join(" ".join(line.split()) for line in expected.lines()[:-1])
        yield (
            f"warning: the run needs about {_gb(expected.total)} of the GPU's memory ({parts}), and {_gb(free)} are "
            f"free; to need less: {'; '.join(advice(setup)[:4])}"
        )


@contextmanager
def explained_memory(setup: Setup) -> Iterator[None]:
    """Turn torch's out-of-memory error into one with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise QieError(
            "the device ran out of memory",
            expected=f"about {_gb(estimate(setup).total)} for this configuration",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="; or ".join(advice(setup)) or "use a device with more memory, or stop other programs on it",
        ) from error


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"
